"""News of the processes of a job are heard once, in any process, even if one was killed."""

from pathlib import Path

from etude.backends.job_training import News
from etude.backends.job_worker import JobFolder


def test_news_are_heard_from_a_position_on_and_half_a_line_spoils_no_other(tmp_path: Path) -> None:
    writer, reader = JobFolder(tmp_path), JobFolder(tmp_path)
    assert [*reader.read_news(0)] == []
    writer.add_news(News(kind="started"))
    with writer.news.open("a") as file:
        file.write('{"kind": "stepped", "st')  # Its process was killed.
    [(first, position)] = reader.read_news(0)
    assert first == News(kind="started")
    assert [*reader.read_news(position)] == []
    writer.add_news(News(kind="started", step=5))
    writer.add_news(News(kind="done", digest="d"))
    (again, _), (done, end) = reader.read_news(position)
    assert (again.step, done.digest, done.is_end) == (5, "d", True)
    assert [*reader.read_news(end)] == []

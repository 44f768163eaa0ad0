"""News of the processes of a job are heard once, in any process, even if one was killed."""

from __future__ import annotations

from pathlib import Path

from etude.backends.job_worker import JobFolder, News


def test_news_are_heard_from_a_position_on_and_half_a_line_spoils_no_other(tmp_path: Path) -> None:
    told, hears = JobFolder(tmp_path), JobFolder(tmp_path)
    assert [*hears.hear(0)] == []
    told.tell(News(kind="started"))
    with told.news.open("a") as file:
        file.write('{"kind": "stepped", "st')  # Its process was killed.
    [(first, position)] = hears.hear(0)
    assert first == News(kind="started")
    assert [*hears.hear(position)] == []
    told.tell(News(kind="started", step=5))
    told.tell(News(kind="done", digest="d"))
    (again, _), (done, end) = hears.hear(position)
    assert (again.step, done.digest, done.is_end) == (5, "d", True)
    assert [*hears.hear(end)] == []

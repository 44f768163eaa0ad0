import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.errors import StoreError
from etude.store.database import Writer
from etude.store.journal import Journal
from tests.support import draws, json_values, until

keys = st.text(alphabet=st.characters(exclude_categories=["Cs", "Cn"]), min_size=1, max_size=12)
entries = st.dictionaries(keys, json_values(), max_size=8)


def count_calls(value):
    """A function that returns `value` and a list that grows by one at each call."""
    calls: list[int] = []

    async def fn():
        calls.append(1)
        return value

    return fn, calls


@pytest.mark.parametrize(
    ("value", "kept"), [({"answer": 42}, {"answer": 42}), (None, None), ({"pair": (1, 2)}, {"pair": [1, 2]})]
)
async def test_a_step_runs_once_and_is_remembered_also_by_the_next_process(tmp_path, value, kept) -> None:
    fn, calls = count_calls(value)
    for _ in range(2):
        with Journal(tmp_path / "run.db") as journal:
            assert await journal.step("a", fn) == await journal.step("a", fn) == kept
    assert len(calls) == 1


async def test_a_step_that_fails_stores_nothing_and_runs_again(journal: Journal) -> None:
    async def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await journal.step("a", fail)
    assert "a" not in dict(journal.scan())
    fn, _ = count_calls(7)
    assert await journal.step("a", fn) == 7


async def test_a_value_that_is_no_json_is_refused_by_name(journal: Journal) -> None:
    fn, _ = count_calls(object())
    with pytest.raises(TypeError, match=r"'train/1' .* JSON: "):
        await journal.step("train/1", fn)
    assert "train/1" not in dict(journal.scan())


async def test_scan_gives_the_prefix_in_key_order_over_many_pages(journal: Journal) -> None:
    keys = [f"train/{index:04d}" for index in range(700)]
    await asyncio.gather(*(journal.put(key, index) for index, key in enumerate(keys)))
    await journal.put("trail", 0)
    await journal.put("train0", 0)
    assert list(journal.scan("train/")) == [(key, index) for index, key in enumerate(keys)]


async def test_records_come_back_in_their_order_also_in_the_next_process(tmp_path: Path) -> None:
    for first in (0, 2):
        with Journal(tmp_path / "run.db") as journal:
            await journal.append({"number": first})
            journal.append_soon({"number": first + 1})
    with Journal(tmp_path / "run.db") as journal:
        assert [record["number"] for record in journal.records()] == [0, 1, 2, 3]


async def test_a_step_that_is_forgotten_is_taken_anew(journal: Journal) -> None:
    await journal.put("a", "old")
    await journal.put("a/b", "stays")
    await journal.forget("a")
    fn, _ = count_calls("new")
    assert await journal.step("a", fn) == "new"
    assert journal.get("a/b") == "stays"
    # Writes keep their order.
    writes = [journal.put("a", 1), journal.forget("a"), journal.put("a", 2), journal.put("a", 3)]
    await asyncio.gather(*writes)
    assert journal.get("a") == 3


async def test_flush_waits_for_writes_that_nobody_awaits(journal: Journal) -> None:
    writes = [asyncio.ensure_future(journal.put(str(index), index)) for index in range(100)]
    await asyncio.sleep(0)
    await journal.flush()
    assert sum(1 for _ in journal.scan()) == 100
    await asyncio.gather(*writes)


@settings(max_examples=draws(8), deadline=None)
@given(entries=entries, prefix=st.text(max_size=2).filter(str.isprintable))
def test_any_unicode_key_and_json_value_comes_back(entries, prefix, tmp_path_factory) -> None:
    async def check() -> None:
        with Journal(tmp_path_factory.mktemp("journal") / "run.db") as journal:
            await asyncio.gather(*(journal.put(key, value) for key, value in entries.items()))
            assert dict(journal.scan()) == entries
            expected = sorted(key for key in entries if key.startswith(prefix))
            assert [key for key, _ in journal.scan(prefix)] == expected

    asyncio.run(check())


async def test_a_key_that_is_no_text_is_an_error_and_a_value_that_is_none_is_kept(journal: Journal) -> None:
    with pytest.raises(StoreError, match="not valid Unicode"):
        await journal.put("\ud800", 1)
    await journal.put("fine", "half \ud83d")
    assert journal.get("fine") == "half \ud83d"


async def test_a_closed_journal_says_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.db")
    journal.close()
    journal.close()
    with pytest.raises(StoreError, match="closed"):
        journal.get("a")
    with pytest.raises(StoreError, match="closed"):
        await journal.put("a", 1)


async def test_another_process_may_read_while_one_writes(tmp_path: Path) -> None:
    with Journal(tmp_path / "run.db") as journal:
        await journal.put("a", 1)
        with Journal(tmp_path / "run.db", read_only=True) as reader:
            await journal.put("b", 2)
            assert dict(reader.scan()) == {"a": 1, "b": 2}
            with pytest.raises(StoreError, match="reading only"):
                await reader.put("c", 3)


def test_what_is_no_journal_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        Journal(tmp_path / "run.db", read_only=True)
    with pytest.raises(StoreError, match=r"nowhere/run\.db: .*folder"):
        Journal(tmp_path / "nowhere" / "run.db")
    (tmp_path / "empty.db").touch()
    with pytest.raises(StoreError, match=r"empty\.db is empty: .*`etude resume`"):
        Journal(tmp_path / "empty.db", read_only=True)
    (tmp_path / "run.db").write_bytes(b"this is not a database at all, only text" * 30)
    with pytest.raises(StoreError, match=r"run\.db: .*not a journal"):
        Journal(tmp_path / "run.db")


async def test_a_write_that_fails_is_told_and_leaves_the_journal_usable(tmp_path: Path) -> None:
    """Operations that are stored soon are tried again."""
    path = tmp_path / "run.db"
    with Journal(path) as journal, sqlite3.connect(path) as other:
        await journal.put("a", 1)
        other.execute("ALTER TABLE steps RENAME TO gone")
        other.commit()
        journal.put_soon("sum", {"number": 1})
        outcomes = await asyncio.gather(*(journal.put(str(i), i) for i in range(3)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StoreError] * 3
        with pytest.raises(StoreError, match=r"run\.db: no such table"):
            await journal.forget("a")
        other.execute("ALTER TABLE gone RENAME TO steps")
        other.commit()
        await journal.put("b", 2)
        assert dict(journal.scan()) == {"a": 1, "b": 2, "sum": {"number": 1}}


async def test_what_is_stored_soon_is_stored_before_what_comes_next(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with Journal(path) as journal, sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        for number in range(100):
            journal.put_soon("sum", {"number": number})
        storing = asyncio.ensure_future(journal.put("next", 1))
        await asyncio.sleep(0)
        other.execute("COMMIT")
        await storing
        assert dict(journal.scan()) == {"next": 1, "sum": {"number": 99}}
        assert journal.writer.committed == 1, "what sums up is not news"


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_what_is_stored_soon_needs_nothing_to_come_next(journal: Journal, elsewhere: bool) -> None:
    """From a thread too, where a user's trainer may log its metrics."""
    if elsewhere:
        await asyncio.to_thread(journal.put_soon, "sum", {"number": 1})
    else:
        journal.put_soon("sum", {"number": 1})
    await until(lambda: not journal.writer.waiting and journal.get("sum") is not None)
    assert journal.get("sum") == {"number": 1} and not journal.writer.committed, "what it sums up counts"


async def test_whatever_fails_while_it_is_stored_nobody_waits_for_ever(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody foresaw is told to all who wait, and the thread goes on."""
    monkeypatch.setattr("etude.store.database.checksum", None)
    journal.put_soon("sum", {"number": 0})
    with pytest.raises(StoreError, match=r"run\.db cannot be written: TypeError: 'NoneType' object"):
        await asyncio.wait_for(journal.flush(), 60)
    monkeypatch.undo()
    journal.put_soon("sum", {"number": 1})
    await asyncio.wait_for(journal.put("next", 1), 60)
    assert dict(journal.scan()) == {"next": 1, "sum": {"number": 1}} and not journal.writer.waiting_seconds


async def test_only_known_keys_are_looked_up(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    select = journal.select
    monkeypatch.setattr(
        journal, "select", lambda query, bounds=(): looked.append(bounds) or select(query, bounds)
    )
    fn, _ = count_calls(7)
    assert journal.get("a") is None
    assert await journal.step("b", fn) == 7
    assert not looked
    assert await journal.step("b", fn) == 7
    assert looked == [("b",)]


async def test_what_is_stored_in_one_turn_of_the_event_loop_is_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes: list[int] = []
    write = Writer._write

    def note(self: Writer, batch: list[Any]) -> None:
        sizes.append(len(batch))
        write(self, batch)

    monkeypatch.setattr(Writer, "_write", note)
    with Journal(tmp_path / "run.db") as journal:
        await asyncio.gather(*(journal.put(f"{number}", number) for number in range(20)))
        assert sizes == [20]
        assert [value for _, value in journal.scan()] == sorted(range(20), key=str)


def test_what_one_event_loop_had_queued_at_its_end_is_stored(tmp_path: Path):
    async def queue() -> None:
        tasks = [asyncio.ensure_future(journal.put(f"early/{number}", number)) for number in range(50)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()

    with Journal(tmp_path / "run.db") as journal:
        asyncio.run(queue())
        asyncio.run(journal.put("late", 1))
        assert dict(journal.scan()) == {"late": 1} | {f"early/{number}": number for number in range(50)}

"""Interrupting a play in the middle of its tree: nothing is asked twice, and the tree is the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etude.core.call import ChatRequest, Completion
from etude.core.episode import EpisodeRecord
from etude.protocols import Protocol, debate, mnip, nip
from etude.store.journal import Journal
from tests.protocols.games import ChanceEngine, play_record

PLAYS: list[tuple[Protocol, object]] = [
    (nip(max_message_rounds=7), 2),
    (debate(max_message_rounds=5), 2),
    (mnip(max_message_rounds=4, verifier_first=False), {"prover0": 2, "verifier": 3}),
]


class Interrupted(ChanceEngine):
    """Does not answer any more after a number of answers, like a process that is about to be killed."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.left = answers
        self.stuck = asyncio.Event()

    async def complete(self, request: ChatRequest) -> Completion:
        completion = await super().complete(request)
        self.left -= 1
        if self.left < 0:
            self.stuck.set()
            await asyncio.Event().wait()
        return completion


def calls_in(journal: Journal) -> set[int]:
    """The keys of the requests whose answers are kept."""
    return {value["key"] for key, value in journal.scan() if "/call/" in key}


async def interrupt(protocol: Protocol, widths: object, path: Path, answers: int) -> set[int]:
    """Start a play and stop it after some answers; the keys of those that are kept."""
    engine = Interrupted(answers)
    with Journal(path) as journal:
        task = asyncio.ensure_future(play_record(protocol, engine, journal, widths=widths, retries=1))
        await engine.stuck.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return calls_in(journal)


async def finish(protocol: Protocol, widths: object, path: Path) -> tuple[EpisodeRecord, list[int]]:
    """Play to the end, with what is there; the keys of the requests that were made."""
    engine = ChanceEngine()
    with Journal(path) as journal:
        record = await play_record(protocol, engine, journal, widths=widths, retries=1)
    return record, [request.key for request in engine.requests]


@pytest.mark.parametrize(("protocol", "widths"), PLAYS, ids=lambda value: getattr(value, "name", str(value)))
async def test_a_play_that_is_taken_up_again_asks_nothing_twice(
    protocol: Protocol, widths: object, tmp_path: Path
) -> None:
    whole, asked = await finish(protocol, widths, tmp_path / "whole.db")
    assert len(set(asked)) == len(asked) > 15
    for cut in range(0, len(asked), 1 + len(asked) // 6):
        path = tmp_path / f"cut{cut}.db"
        kept = await interrupt(protocol, widths, path, cut)
        kept |= await interrupt(protocol, widths, path, 2) if len(asked) - cut > 8 else set()
        record, again = await finish(protocol, widths, path)
        assert not kept & set(again)
        assert record.output == whole.output
        assert [call.completion for call in record.calls] == [call.completion for call in whole.calls]

"""Plays environments of the registries with a player who answers at random, and prints a table.

Nothing is learned: it shows whether an environment runs from its config, how long its episodes are, and how
much a model has to read.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import print_json

from etude.config.builder import Builder
from etude.config.load import parse_config
from etude.core.call import ChatRequest, Completion
from etude.core.errors import EtudeError
from etude.rollout.collector import Collector, EpisodeJob, Limits
from etude.store.journal import Journal

MOVES = ["left", "down", "right", "up"]
NUMBERS = [f"[{number}]" for number in range(9)]

ENVIRONMENTS: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "FrozenLake-v1": (
        {"_type": "gym", "arguments": {"render_mode": "ansi"}, "action": MOVES, "max_turns": 100},
        MOVES,
    ),
    "Taxi-v4": (
        {"_type": "gym", "arguments": {"render_mode": "ansi"}, "max_turns": 50},
        [str(number) for number in range(6)],
    ),
    "CliffWalking-v1": (
        {"_type": "gym", "arguments": {"render_mode": "ansi"}, "max_turns": 50},
        ["0", "1", "2", "3"],
    ),
    "Blackjack-v1": ({"_type": "gym", "action": ["stick", "hit"]}, ["stick", "hit"]),
    "CartPole-v1": ({"_type": "gym", "action": ["left", "right"], "max_turns": 200}, ["left", "right"]),
    "chain_sum": ({"_type": "reasoning_gym"}, ["100"]),
    "countdown": ({"_type": "reasoning_gym"}, ["1 + 1"]),
    "ConnectFour-v0": (
        {"_type": "textarena", "seats": ["first", "second"]},
        [f"[col {n}]" for n in range(7)],
    ),
    "TicTacToe-v0": ({"_type": "textarena", "seats": ["first", "second"]}, NUMBERS),
    "LiarsDice-v0": (
        {"_type": "textarena", "seats": ["first", "second"]},
        ["[Call]", "[Bid: 2, 3]", "[Bid: 3, 4]", "[Bid: 4, 5]"],
    ),
}
"""The workflows, and the answers that are drawn from: legal ones mostly."""


class RandomPlayer:
    """Answers with one of a list."""

    version = 0

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers, self._random, self.longest = answers, random.Random(0), 0

    async def complete(self, request: ChatRequest) -> Completion:
        """An answer that has nothing to do with the question."""
        self.longest = max(self.longest, sum(len(str(each["content"])) for each in request.messages))
        return Completion({"role": "assistant", "content": self._random.choice(self._answers)})

    async def adopt(self, version: Any) -> None:
        """There are no weights."""

    async def close(self) -> None:
        """There is nothing to free."""


async def play(
    name: str, workflow: Mapping[str, Any], answers: Sequence[str], episodes: int
) -> dict[str, Any]:
    """The figures of an environment. Raises SystemExit for one that there is not."""
    stub = {"_type": "openai", "base_url": "http://127.0.0.1:1/v1"}
    seats = ("first", "second") if "seats" in workflow else ("policy",)
    key = "task" if workflow["_type"] == "reasoning_gym" else "id"
    config = {
        "workflow": {**workflow, key: name},
        "llms": {seat: stub | {"model_name": seat} for seat in seats},
    }
    player = RandomPlayer(answers)
    records = []
    try:
        with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "run.db") as journal:
            async with Builder(parse_config(config)) as builder:
                examples = (await builder.get_dataset()).examples()[:episodes]
                collector = Collector(
                    await builder.get_workflow(),
                    dict.fromkeys(seats, player),
                    journal,
                    limits=Limits(max_concurrency=1),
                    default_model=seats[0],
                )
                async for record in collector.collect(EpisodeJob(each.id, each) for each in examples):
                    records.append(record)
    except EtudeError as error:
        raise SystemExit(f"{name}: {error}") from error
    failures = [record.failure.reason for record in records if record.failure is not None]
    scores = [
        {event.agent or event.name: event.value for event in record.events if event.kind == "score"}
        for record in records
        if record.failure is None
    ]
    means = {key: statistics.mean(score[key] for score in scores) for key in (scores[0] if scores else ())}
    return {
        "episodes": len(records),
        "failed": len(failures),
        "error": failures[0] if failures else None,
        "answers": statistics.mean(len(record.calls) for record in records),
        "invalid": means.pop("invalid", None),
        "longest_prompt": player.longest,
        "rewards": {key: value for key, value in means.items() if key != "turns"},
    }


def markdown(played: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The rows of the table."""
    yield "| environment | runs | answers | invalid | longest prompt | reward |"
    yield "|---|---|---|---|---|---|"
    for name, row in played.items():
        kind = ENVIRONMENTS[name][0]["_type"]
        runs = f"{row['episodes'] - row['failed']} of {row['episodes']}"
        if row["failed"] == row["episodes"]:
            yield f"| {kind} `{name}` | {runs} | | | | |"
            continue
        invalid = "" if row["invalid"] is None else f"{row['invalid']:.1f}"
        rewards = ", ".join(f"{value:.2f}" for value in row["rewards"].values())
        figures = f"{row['answers']:.1f} | {invalid} | {row['longest_prompt']:,} | {rewards}"
        yield f"| {kind} `{name}` | {runs} | {figures} |"


def main() -> None:
    """Play all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument(
        "--only", choices=[*ENVIRONMENTS], action="append", help="this one alone; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    given = parser.parse_args()
    played = {
        name: asyncio.run(play(name, *ENVIRONMENTS[name], given.episodes))
        for name in given.only or ENVIRONMENTS
    }
    if given.json:
        print_json(played)
    else:
        print("\n".join([*markdown(played), *(str(row["error"]) for row in played.values() if row["error"])]))


if __name__ == "__main__":
    main()

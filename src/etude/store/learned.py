"""The record of what learners were given: the samples of each job, as far as the journal does not have them.

checkpoints/**/learned/v3.jsonl   the samples that version 3 was made of, as its learner took them
submitted/4/run-epoch-4.jsonl     the data of a job of the fourth epoch, as they were handed to its backend,
                                  or as its learner took them where the backend says so

A file has a line for each sample after one about the job. Token ids, texts and sampled logprobs are in the
journal; a line has the episode that they are of, and a digest of the ids. Numbers of whole answers are
written once for each. Where no token ids are known, a line has the messages.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from etude.core.errors import StoreError
from etude.core.message import Message
from etude.core.sample import Sample
from etude.store.files import write_atomically

FOLDER = "learned"
SUBMITTED = "submitted"
_DIGITS = 4
"""Significant ones of numbers that a learner computed."""


@dataclass(frozen=True, slots=True)
class Source:
    """Who wrote down what was trained on."""

    job: str = ""
    target: str | None = None
    """The target whose job it was, in a run of several."""
    version: int | None = None
    """The version that was made of it; None in the record of what was handed to a backend."""
    backend: str = ""
    """The backend that was handed it; empty in the record of a learner."""
    takes_text: bool = False
    """Whether that backend is given messages, and makes the tokens itself."""
    makes_advantages: bool = False
    """Whether that backend is given rewards. The advantages are then those that the run's algorithm has."""


@dataclass(frozen=True, slots=True)
class LearnedTurn:
    """An answer within a sample: `ids[start:stop]` are its tokens."""

    start: int
    stop: int
    version: int | None
    """Of the weights that sampled it."""


@dataclass(frozen=True, slots=True)
class LearnedSample:
    """One token sequence of T tokens that was trained on, or messages where no token ids are known."""

    episode: str
    digest: str
    """Of its token ids."""
    length: int
    """T."""
    reward: float
    turns: tuple[LearnedTurn, ...]
    advantages: tuple[float, ...] | None
    """[T]; None where the loss wants none."""
    weights: tuple[float, ...]
    """[T], the share of each token in the loss before it is normalised: 0 where nothing is trained."""
    side: str = ""
    """`chosen` or `rejected`, of a pair."""
    agent: str | None = None
    ratios: Mapping[int, float] = field(default_factory=dict)
    """By position: log π - log π_sampled when the sample was first learned from, where that was recorded."""
    entropies: Mapping[int, float] = field(default_factory=dict)
    """By position: in nats, where the loss wanted them and they were recorded."""
    messages: tuple[Message, ...] = ()
    """Where no token ids are known. Those of the assistant are trained on, but for those of the weight 0."""
    source: Source = Source()


@dataclass(frozen=True, slots=True)
class Seen:
    """Numbers of a sample's trained tokens, in their order, as the learner computed them."""

    logprobs: Sequence[float] = ()
    entropies: Sequence[float] = ()


def ids_digest(ids: Iterable[int]) -> str:
    """A short digest of token ids."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return hashlib.blake2b(packed.tobytes(), digest_size=8).hexdigest()


def learned_lines(
    source: Source, units: Sequence[Sequence[Sample]], seen: Mapping[int, Seen] | None = None
) -> str:
    """The record of a job's samples as lines of JSON; `seen` is what a learner computed, by their `id`."""
    lines: list[Any] = [asdict(source)]
    for unit in units:
        sides = ("chosen", "rejected") if len(unit) == 2 else ("",)
        lines += [
            _encoded(sample, side, (seen or {}).get(id(sample), Seen()))
            for sample, side in zip(unit, sides, strict=False)
            if sample.ids or sample.messages
        ]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def write_learned(versions: Path, number: int, lines: str) -> None:
    """Write the record of the samples that a version was made of, in the folder of a model's versions.

    Raises StoreError.
    """
    write_atomically(versions / FOLDER / f"v{number}.jsonl", lines, exact=True)


def write_submitted(run: Path, epoch: int, job: str, lines: str) -> None:
    """Write the record of a job of an epoch (from 1) that another backend trains. Raises StoreError."""
    write_atomically(run / SUBMITTED / str(epoch) / f"{job}.jsonl", lines, exact=True)


def read_learned(
    run: Path, episode: str, *, version: int | None = None, epoch: int | None = None
) -> list[LearnedSample]:
    """The samples of an episode that were trained on, as the learner took them where it has said so.

    They are looked for first where that `version` was made, or that `epoch` (from 1) submitted its job; of a
    run with several targets, for each of them. Raises StoreError for a file that cannot be read.
    """
    wanted = f'{{"episode":{json.dumps(episode)},'
    learned = sorted(
        run.glob(f"checkpoints/**/{FOLDER}/v*.jsonl"), key=lambda file: file.stem != f"v{version}"
    )
    submitted = sorted(
        run.glob(f"{SUBMITTED}/*/*.jsonl"),
        key=lambda file: (file.parent.name != str(epoch), -file.stat().st_mtime_ns),
    )
    samples: dict[Path | str | None, list[LearnedSample]] = {}
    for file in (*learned, *submitted):
        own_folder = file.parent if file.parent.parent != run / "checkpoints" else None
        try:
            with file.open(encoding="utf-8") as lines:
                source = Source(**json.loads(next(lines)))
                target = own_folder if file in learned else source.target
                if target not in samples:
                    own = [_decoded(line, source) for line in lines if line.startswith(wanted)]
                    samples |= {target: own} if own else {}
        except (OSError, ValueError, TypeError, KeyError, StopIteration) as error:
            raise StoreError(f"{file} cannot be read ({error}); the run does without it") from error
    return [sample for own in samples.values() for sample in own]


def records_state(run: Path) -> float:
    """A number that grows when a record is added to the run."""
    folders = [
        run / "checkpoints" / FOLDER,
        *run.glob(f"checkpoints/*/{FOLDER}"),
        *run.glob(f"{SUBMITTED}/*"),
    ]
    return max((folder.stat().st_mtime for folder in folders if folder.exists()), default=0.0)


def _encoded(sample: Sample, side: str, seen: Seen) -> dict[str, Any]:
    if not sample.ids:
        return {
            "episode": sample.episode or "",
            "reward": sample.reward,
            "side": side,
            "agent": sample.agent,
            "messages": sample.messages,
        }
    places = [at for at, weight in enumerate(sample.loss_weights) if weight]
    data = {
        "episode": sample.episode or "",
        "digest": ids_digest(sample.ids),
        "length": len(sample.ids),
        "reward": sample.reward,
        "turns": [[turn.start, turn.stop, turn.model_version] for turn in sample.turns],
        "advantages": None if sample.advantages is None else _short_of(sample, sample.advantages),
        "weights": None if _is_plain(sample) else _short_of(sample, sample.loss_weights),
        "side": side or None,
        "agent": sample.agent,
    }
    # The first token of all is not chosen after anything.
    places = [at for at in places if at]
    if seen.logprobs and sample.logprobs is not None:
        gaps = (new - sample.logprobs[at] for at, new in zip(places, seen.logprobs, strict=False))
        data["ratios"] = [*map(_short, gaps)]
    if seen.entropies:
        data["entropies"] = [*map(_short, seen.entropies)]
    return {name: value for name, value in data.items() if value is not None}


def _decoded(line: str, source: Source) -> LearnedSample:
    data = json.loads(line)
    if "messages" in data:
        return LearnedSample(
            episode=data["episode"],
            digest="",
            length=0,
            reward=data["reward"],
            turns=(),
            advantages=None,
            weights=(),
            side=data["side"],
            agent=data["agent"],
            messages=tuple(data["messages"]),
            source=source,
        )
    turns, length = tuple(LearnedTurn(*turn) for turn in data["turns"]), data["length"]
    weights = _spread(data.get("weights", [1.0] * len(turns)), turns, length)
    places = [at for at, weight in enumerate(weights) if weight and at]
    return LearnedSample(
        episode=data["episode"],
        digest=data["digest"],
        length=length,
        reward=data["reward"],
        turns=turns,
        advantages=_spread(data["advantages"], turns, length) if "advantages" in data else None,
        weights=weights,
        side=data.get("side", ""),
        agent=data.get("agent"),
        ratios=dict(zip(places, data.get("ratios", ()), strict=False)),
        entropies=dict(zip(places, data.get("entropies", ()), strict=False)),
        source=source,
    )


def _is_plain(sample: Sample) -> bool:
    """Whether all answers count alike in the loss, and nothing else does."""
    return [*map(float, sample.loss_weights)] == [*sample.by_token([1.0] * len(sample.turns))]


def _short_of(sample: Sample, values: Sequence[float]) -> dict[str, list[Any]] | list[float]:
    """One number for each answer where its tokens have the same and all others 0; else runs of equal ones."""
    firsts = [float(values[turn.start]) if turn.stop > turn.start else 0.0 for turn in sample.turns]
    if [*map(float, values)] == [*sample.by_token(firsts)]:
        return firsts
    return {"runs": [[float(value), sum(1 for _ in run)] for value, run in groupby(values)]}


def _spread(values: Any, turns: Sequence[LearnedTurn], length: int) -> tuple[float, ...]:
    """The numbers of `_short_of` as one for each token."""
    if isinstance(values, dict):
        return tuple(chain.from_iterable([value] * int(count) for value, count in values["runs"]))
    spread = [0.0] * length
    for turn, value in zip(turns, values, strict=True):
        spread[turn.start : turn.stop] = [value] * (turn.stop - turn.start)
    return tuple(spread)


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")

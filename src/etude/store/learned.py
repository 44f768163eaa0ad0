"""The record of the samples that learners trained on.

`checkpoints/**/learned/v3.jsonl` has the samples that version 3 was made from, as its learner took them. Its
first line is about the job, and each further line about a sample. The journal has the token
ids, texts and sampled logprobs. A line has the sample's episode and a digest of its ids. Samples without
token ids are left out.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from etude.core.errors import StoreError
from etude.core.sample import Sample
from etude.store.episodes import phase_epoch
from etude.store.files import write_atomically
from etude.store.journal import Journal
from etude.store.log import read_histories

FOLDER = "learned"


@dataclass(frozen=True, slots=True)
class Source:
    """The job whose samples a file records."""

    job: str = ""
    version: int | None = None
    """The version that the job made."""


@dataclass(frozen=True, slots=True)
class LearnedSample:
    """One token sequence of T tokens that was trained on."""

    episode: str
    reward: float
    digest: str
    """The digest of its token ids."""
    length: int
    """T."""
    advantages: tuple[float, ...] | None = None
    """[T]; None if the loss uses none."""
    weights: tuple[float, ...] = ()
    """[T], the share of each token in the loss before normalisation; 0 for tokens that are not trained on."""
    side: str = ""
    """`chosen` or `rejected` in a pair, else empty."""
    agent: str | None = None
    source: Source = Source()


def ids_digest(ids: Iterable[int]) -> str:
    """Return a short digest of token ids."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return hashlib.blake2b(packed.tobytes(), digest_size=8).hexdigest()


def learned_lines(source: Source, units: Sequence[Sequence[Sample]]) -> str:
    """Return the record of a job's samples as lines of JSON."""
    lines: list[Any] = [asdict(source)]
    for unit in units:
        sides = ("chosen", "rejected") if len(unit) == 2 else ("",)
        lines += [_encoded(sample, side) for sample, side in zip(unit, sides, strict=False) if sample.ids]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def write_learned(versions: Path, number: int, lines: str) -> None:
    """Write the record of the samples that a version was made from. Raises StoreError."""
    write_atomically(versions / FOLDER / f"v{number}.jsonl", lines, exact=True)


def read_learned(run: Path, episode: str, *, version: int | None = None) -> list[LearnedSample]:
    """Return an episode's trained samples; files of `version` come first. Raises StoreError."""
    wanted = f'{{"episode":{json.dumps(episode)},'
    learned = sorted(
        run.glob(f"checkpoints/**/{FOLDER}/v*.jsonl"), key=lambda file: file.stem != f"v{version}"
    )
    samples: dict[Path, list[LearnedSample]] = {}
    for file in learned:
        if file.parent in samples:
            continue
        try:
            with file.open(encoding="utf-8") as lines:
                source = Source(**json.loads(next(lines)))
                if own := [_decoded(line, source) for line in lines if line.startswith(wanted)]:
                    samples[file.parent] = own
        except (OSError, ValueError, TypeError, KeyError, StopIteration) as error:
            raise StoreError(f"{file} cannot be read ({error}); the run continues without it") from error
    return [sample for own in samples.values() for sample in own]


def records_state(run: Path) -> float:
    """Return a number that grows when a record is added to the run."""
    folders = run.glob(f"checkpoints/**/{FOLDER}")
    return max((folder.stat().st_mtime for folder in folders), default=0.0)


def _encoded(sample: Sample, side: str) -> dict[str, Any]:
    data = {
        "episode": sample.episode or "",
        "digest": ids_digest(sample.ids),
        "length": len(sample.ids),
        "reward": sample.reward,
        "advantages": None if sample.advantages is None else _shorten(sample.advantages),
        "weights": _shorten(sample.loss_weights),
        "side": side or None,
        "agent": sample.agent,
    }
    return {name: value for name, value in data.items() if value is not None}


def _decoded(line: str, source: Source) -> LearnedSample:
    data = json.loads(line)
    return LearnedSample(
        episode=data["episode"],
        digest=data["digest"],
        length=data["length"],
        reward=data["reward"],
        advantages=_spread(data["advantages"]) if "advantages" in data else None,
        weights=_spread(data["weights"]),
        side=data.get("side", ""),
        agent=data.get("agent"),
        source=source,
    )


def _shorten(values: Sequence[float]) -> list[list[float]]:
    """Return runs of equal numbers: each number, and how many tokens in a row have it."""
    return [[float(value), sum(1 for _ in run)] for value, run in groupby(values)]


def _spread(runs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return one number per token, from runs of equal numbers."""
    return tuple(chain.from_iterable([value] * int(count) for value, count in runs))


def trained_samples(run: Path, journal: Journal, episode: str, phase: str) -> list[LearnedSample]:
    """Return the trained samples of an episode that have token ids. Raises StoreError."""
    epoch = phase_epoch(phase)
    if epoch is None:
        return []
    entries = (entry for history in read_histories(journal).values() for entry in history.epochs)
    versions = (entry.version for entry in entries if entry.epoch == epoch + 1)
    number = next((version.number for version in versions if version is not None), None)
    return read_learned(run, episode, version=number)

"""The record of the samples that learners trained on.

`checkpoints/**/learned/v3.jsonl` has the samples that version 3 was made from, as its learner took them, one
on each line. The journal has the token ids, texts and sampled logprobs. A line has the sample's episode and
a digest of its ids. Samples without token ids are left out.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import TypeAlias

from pydantic import BaseModel
from pydantic_core import to_json

from etude.core.errors import StoreError
from etude.core.sample import Sample
from etude.store.episodes import phase_epoch
from etude.store.files import write_atomically
from etude.store.journal import Journal
from etude.store.log import read_histories

FOLDER = "learned"

Runs: TypeAlias = tuple[tuple[float, int], ...]
"""Numbers, and how many tokens in a row have each."""


class LearnedSample(BaseModel, frozen=True):
    """One token sequence of T tokens that was trained on."""

    episode: str
    version: int
    """The version that it was trained for."""
    reward: float
    digest: str
    """The digest of its token ids."""
    length: int
    """T."""
    advantage_runs: Runs | None = None
    weight_runs: Runs = ()
    side: str = ""
    """`chosen` or `rejected` in a pair, else empty."""

    @property
    def advantages(self) -> tuple[float, ...] | None:
        """The advantages [T]; None if the loss uses none."""
        return None if self.advantage_runs is None else _spread(self.advantage_runs)

    @property
    def weights(self) -> tuple[float, ...]:
        """The share of each token in the loss before normalisation [T]; 0 for tokens that are not trained
        on."""
        return _spread(self.weight_runs)


def ids_digest(ids: Iterable[int]) -> str:
    """Return a short digest of token ids."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return hashlib.blake2b(packed.tobytes(), digest_size=8).hexdigest()


def learned_lines(version: int, units: Sequence[Sequence[Sample]]) -> str:
    """Return the record of the samples that a version is made from, as lines of JSON."""
    lines = []
    for unit in units:
        sides = ("chosen", "rejected") if len(unit) == 2 else ("",)
        for sample, side in zip(unit, sides, strict=False):
            learned = LearnedSample(
                episode=sample.episode or "",
                version=version,
                reward=sample.reward,
                digest=ids_digest(sample.ids),
                length=len(sample.ids),
                advantage_runs=None if sample.advantages is None else _runs(sample.advantages),
                weight_runs=_runs(sample.loss_weights),
                side=side,
            )
            lines += [learned.model_dump_json(exclude_defaults=True)] if sample.ids else []
    return "".join(f"{line}\n" for line in lines)


def write_learned(versions: Path, number: int, lines: str) -> None:
    """Write the record of the samples that a version was made from. Raises StoreError."""
    write_atomically(versions / FOLDER / f"v{number}.jsonl", lines, exact=True)


def read_learned(run: Path, episode: str, *, version: int | None = None) -> list[LearnedSample]:
    """Return an episode's trained samples; files of `version` come first. Raises StoreError."""
    wanted = f'{{"episode":{to_json(episode).decode()},'
    files = sorted(run.glob(f"checkpoints/**/{FOLDER}/v*.jsonl"), key=lambda file: file.stem != f"v{version}")
    samples: dict[Path, list[LearnedSample]] = {}
    for file in files:
        if file.parent in samples:
            continue
        try:
            with file.open(encoding="utf-8") as lines:
                own = [LearnedSample.model_validate_json(line) for line in lines if line.startswith(wanted)]
        except (OSError, ValueError) as error:
            raise StoreError(f"{file} cannot be read ({error}); the run continues without it") from error
        if own:
            samples[file.parent] = own
    return [sample for own in samples.values() for sample in own]


def records_state(run: Path) -> float:
    """Return a number that grows when a record is added to the run."""
    folders = run.glob(f"checkpoints/**/{FOLDER}")
    return max((folder.stat().st_mtime for folder in folders), default=0.0)


def _runs(values: Sequence[float]) -> Runs:
    return tuple((float(value), sum(1 for _ in run)) for value, run in groupby(values))


def _spread(runs: Runs) -> tuple[float, ...]:
    return tuple(chain.from_iterable([value] * count for value, count in runs))


def trained_samples(run: Path, journal: Journal, episode: str, phase: str) -> list[LearnedSample]:
    """Return the trained samples of an episode that have token ids. Raises StoreError."""
    epoch = phase_epoch(phase)
    if epoch is None:
        return []
    entries = (entry for history in read_histories(journal).values() for entry in history.epochs)
    versions = (entry.version for entry in entries if entry.epoch == epoch + 1)
    number = next((version.number for version in versions if version is not None), None)
    return read_learned(run, episode, version=number)

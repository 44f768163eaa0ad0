"""The record of what a job was given, kept in the run for every backend whose learner keeps none itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from etude.algorithms.algorithm import algorithm_of, groups_of, kind_of
from etude.backends.trainer_adapter import TrainerAdapter
from etude.core.edge import message_of, units_of
from etude.core.errors import EtudeError, StoreError
from etude.core.job import TrainingJobRef
from etude.core.message import Message, OpenAIMessage
from etude.core.sample import Sample
from etude.core.trajectory import DPOItem, EpisodeItem, Trajectory, TrajectoryCollection
from etude.store.learned import Source, learned_lines, write_submitted

_LOG = logging.getLogger("etude.submitted")


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The record of the jobs of one model of a run, for people to look at: training goes on without.

    Where something cannot be written, the log says so.
    """

    run: Path
    target: str | None
    adapter: TrainerAdapter

    async def submitted(self, epoch: int, collection: TrajectoryCollection, job: TrainingJobRef) -> None:
        """Write down what the backend was handed for an epoch (from 1)."""
        if self.adapter.capabilities().records_samples:
            return
        try:
            lines = await asyncio.to_thread(_lines, self.adapter, collection, Source(job.run_id, self.target))
            await asyncio.to_thread(write_submitted, self.run, epoch, job.run_id, lines)
        except StoreError as error:
            _LOG.warning("what job %s was given is not recorded: %s", job.run_id, error)


def _lines(adapter: TrainerAdapter, collection: TrajectoryCollection, job: Source) -> str:
    takes_ids = {collection.method, kind_of(collection.method)} & adapter.capabilities().token_ids_for
    units = _assigned(collection)
    source = replace(
        job,
        backend=adapter.adapter_config.type_name or type(adapter).__name__,
        takes_text=not takes_ids,
        makes_advantages=units is not None and not _has_advantages(collection),
    )
    return learned_lines(source, _units(collection) if units is None else units)


def _assigned(collection: TrajectoryCollection) -> Sequence[Sequence[Sample]] | None:
    """The samples with the advantages that the algorithm has for them; None where it wants none, or cannot
    say without a learner, and of data without token ids."""
    if kind_of(collection.method) != "samples":
        return None
    try:
        algorithm = algorithm_of(collection.method, collection.options)
        units, _ = algorithm.units(groups_of(collection, algorithm))
    except EtudeError:
        return None
    return units if any(sample.advantages is not None for unit in units for sample in unit) else None


def _has_advantages(collection: TrajectoryCollection) -> bool:
    """Whether the builder has written them into the data."""
    items = chain.from_iterable(each.episode for group in collection.trajectories for each in group)
    return any(isinstance(item, EpisodeItem) and item.advantages is not None for item in items)


def _units(collection: TrajectoryCollection) -> list[Sequence[Sample]]:
    """The data as they are: token sequences, or messages where not all token ids are known."""
    units: list[Sequence[Sample]] = []
    for trajectory in chain.from_iterable(collection.trajectories):
        is_pair = any(isinstance(item, DPOItem) for item in trajectory.episode)
        try:
            known = units_of(trajectory, "pairs" if is_pair else "samples", needs_logprobs=False)
        except EtudeError:
            units += _texts(trajectory)
        else:
            units += [unit.samples for unit in known]
    return units


def _texts(trajectory: Trajectory) -> list[Sequence[Sample]]:
    """The messages of a trajectory, or those of both answers of each of its pairs."""
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    if items:
        messages = tuple(map(message_of, items))
        return [
            (
                Sample(
                    messages=messages,
                    reward=trajectory.reward,
                    episode=trajectory.episode_id,
                    agent=trajectory.agent,
                ),
            )
        ]
    return [
        (
            Sample(
                messages=(*_context(item), _reply(item.chosen_message, item.chosen_response)),
                reward=trajectory.reward,
                episode=item.chosen_episode or trajectory.episode_id,
            ),
            Sample(
                messages=(*_context(item), _reply(item.rejected_message, item.rejected_response)),
                reward=trajectory.reward,
                episode=item.rejected_episode,
            ),
        )
        for item in trajectory.episode
        if isinstance(item, DPOItem)
    ]


def _context(pair: DPOItem) -> list[Message]:
    """The prompt of a pair; what the assistant says in it is not trained on."""
    if isinstance(pair.prompt, str):
        return [{"role": "user", "content": pair.prompt}]
    messages = [message.to_wire() for message in pair.prompt]
    return [{**each, "weight": 0} if each.get("role") == "assistant" else each for each in messages]


def _reply(message: OpenAIMessage | None, text: str) -> Message:
    return {"role": "assistant", "content": text} if message is None else message.to_wire()

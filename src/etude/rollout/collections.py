"""Collections: the episodes that a run provides, fresh for each call and under their own journal key.

Also the choice of examples for an epoch, and statistics of the model's answers.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, cast, get_args

from etude.core.episode import SIMULATED_USER, EpisodeRecord, Example
from etude.core.evaluation import EvalInput, EvaluationRunOutput
from etude.core.keys import shuffled_forever
from etude.engines.meter import Purpose, current_purpose, use_purpose
from etude.rollout.evaluation import Evaluation, OnEpisode, merge_outputs


def examples_for_epoch(
    examples: Sequence[Example], count: int | None, epoch: int, seed: int
) -> list[Example]:
    """Return `count` examples for an epoch, from a seeded shuffle that cycles through the dataset.

    Each pass uses every example once, in a new order, and no epoch has an example twice. If `count` is None
    or covers the dataset, return all examples in their own order.
    """
    if count is None or count >= len(examples):
        return list(examples)
    order, put_off = shuffled_forever(len(examples), seed, "examples"), list[int]()
    for _ in range(epoch + 1):
        chosen, earlier = dict[int, None](), put_off
        put_off = []
        for index in chain(earlier, order):
            if index in chosen:
                put_off.append(index)
            else:
                chosen[index] = None
            if len(chosen) == count:
                break
    return [examples[index] for index in chosen]


Stage = Literal["train", "validation", "warm-up"]


@dataclass(slots=True)
class CollectionStats:
    """Statistics of all episodes that were collected for one epoch.

    Answers are answers of the trained model, without calls that play a user.
    """

    episodes: int = 0
    completion_tokens: int = 0
    model_versions: Counter[int] = field(default_factory=Counter)
    """Calls of the trained model, by the version of the weights that answered them."""
    outputs: dict[tuple[str, int], EvaluationRunOutput] = field(default_factory=dict)
    """The output of each collection, by its key and number, without the episodes."""
    answers: int = 0
    answer_tokens: int = 0
    surprises: list[float] = field(default_factory=list)
    """Per answer: Σ -log p of the sampled tokens, in nats."""
    surprise_tokens: int = 0
    """The number of tokens in `surprises`."""

    def add(self, episode: EpisodeRecord, model: str) -> None:
        """Count an episode and its calls of `model`, an entry of `llms`."""
        self.episodes += 1
        for call in episode.calls:
            if (answer := call.completion) is None:
                continue
            tokens = answer.usage.completion_tokens
            if not call.logged:
                self.completion_tokens += tokens
                if call.model == model:
                    self.model_versions[answer.model_version] += 1
            if call.model == model and call.function != SIMULATED_USER:
                self.answers += 1
                self.answer_tokens += tokens
                # A greedy answer has logprobs at temperature 1, at which it was not sampled.
                if answer.logprobs and call.request.sampling.temperature > 0:
                    self.surprises.append(-math.fsum(answer.logprobs))
                    self.surprise_tokens += len(answer.logprobs)

    def metrics(self) -> dict[str, Any]:
        """Return statistics of all episodes; each is None if no episode allows it.

        `answer_tokens`: mean tokens of an answer.
        `sampled_entropy`: -1/N Σ log p over the N sampled tokens, in nats: an unbiased estimate of the
        entropy of the sampling distributions.
        """
        tokens = self.surprise_tokens
        return {
            "answer_tokens": self.answer_tokens / self.answers if self.answers else None,
            "sampled_entropy": math.fsum(self.surprises) / tokens if tokens else None,
        }

    @property
    def output(self) -> EvaluationRunOutput:
        """All outputs merged, in the order of their keys and numbers."""
        return merge_outputs([self.outputs[key] for key in sorted(self.outputs)])


@dataclass(eq=False)
class Collections(Evaluation):
    """The evaluation run as the parts of one trainer see it.

    Each call of `run` is its own collection. Its episodes are journalled under their epoch or validation and
    the number of the call. So the same call never gets episodes of earlier weights, and a resumed run, which
    calls in the same order, gets its episodes back.
    """

    evaluation: Evaluation
    model: str
    """The trained entry of `llms`."""
    epoch: Callable[[], int]
    """Returns the epoch to collect for, outside of a `collecting_for` block."""
    observer: Callable[[int, EpisodeRecord], None]
    """Called with the epoch (from 0) and each of its training episodes."""
    check: Callable[[int], None]
    """Called before each collection for an epoch; an exception ends the collection."""

    def __post_init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._collected: dict[int, CollectionStats] = {}
        self._running: set[asyncio.Task[Any] | None] = set()

    async def run(
        self,
        examples: Sequence[Example],
        *,
        phase: str = "",
        on_episode: OnEpisode | None = None,
        **options: Any,
    ) -> EvaluationRunOutput:
        """Collect under a new phase. If there is only one kind of collection, `phase` is left out."""
        stage, number = _current_part() or ("train", self.epoch())
        if stage == "train":
            self.check(number)
        key = phase_name(stage, number, phase)
        self._calls[key] += 1
        call = self._calls[key]
        collected = self._collected.setdefault(number, CollectionStats()) if stage == "train" else None

        def count_episode(episode: EpisodeRecord) -> None:
            if collected is not None:
                collected.add(episode, self.model)
                self.observer(number, episode)
            if on_episode is not None:
                on_episode(episode)

        task = asyncio.current_task()
        self._running.add(task)
        try:
            output = await self.evaluation.run(
                examples, phase=collection_phase(key, call), on_episode=count_episode, **options
            )
        finally:
            self._running.discard(task)
        if collected is not None:
            collected.outputs[key, call] = output.model_copy(update={"eval_input": EvalInput()})
        return output

    def of(self, epoch: int) -> CollectionStats:
        """Return the statistics of the episodes collected for an epoch (from 0) so far."""
        return self._collected.get(epoch, CollectionStats())

    def forget(self, epoch: int) -> None:
        """Drop an epoch's statistics."""
        self._collected.pop(epoch, None)

    async def stop(self) -> None:
        """Cancel collections that are still running, and wait until they have stopped."""
        tasks = [task for task in self._running if task is not None and task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def collecting_for(stage: Stage, number: int) -> AbstractContextManager[Purpose]:
    """Collect for an epoch (from 0) or a validation in the block, and in tasks started there.

    Calls outside of episodes are charged to it.
    """
    return use_purpose(Purpose(phase=phase_name(stage, number)))


def current_number(stage: Stage) -> int | None:
    """Return the epoch or validation of this stage that is being collected here; None outside of one."""
    part = _current_part()
    return part[1] if part is not None and part[0] == stage else None


def _current_part() -> tuple[Stage, int] | None:
    name, _, number = current_purpose().phase.partition("/")
    if name not in get_args(Stage) or not number.isdecimal():
        return None
    return cast("Stage", name), int(number) - (name == "train")


def phase_name(stage: Stage, number: int, label: str = "") -> str:
    """Return the phase of the episodes of an epoch (`number` from 0) or a validation.

    The third epoch has `train/3`, and with a label `train/3-k2`.
    """
    name = f"train/{number + 1}" if stage == "train" else f"{stage}/{number}"
    if label in ("", name):
        return name
    return name + "-" + re.sub(r"[^\w~-]+", "-", label)  # `collection_phase` puts its number after a dot.


def collection_phase(phase: str, call: int) -> str:
    """Return the phase of the `call`-th collection (from 1) of one kind: `train/3`, `train/3.2`, …"""
    return phase if call == 1 else f"{phase}.{call}"

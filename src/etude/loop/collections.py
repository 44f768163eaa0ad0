"""Collections: the episodes that a run provides, fresh for each call and under their own journal key.

They are counted, and checked before a job is made of them: the right weights sampled them, and target
functions made calls.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from etude.algorithms.algorithm import data_kind
from etude.algorithms.samples import EVERY_FUNCTION, is_targeted
from etude.core.episode import SIMULATED_USER, EpisodeRecord, Example
from etude.core.errors import RequestError, TrainingError, nearest
from etude.core.evaluation import EvalInput, EvaluationRunOutput
from etude.core.job import ModelVersion
from etude.core.sample import TrainingUnit, TrajectoryCollection
from etude.core.threads import end_tasks
from etude.core.trajectory import EpisodeItem, Trajectory
from etude.rollout.evaluation import Evaluation, OnEpisode, merge_outputs
from etude.rollout.phases import collection_phase, current_part, phase_name


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
    before: Callable[[int], None]
    """Called before each collection for an epoch (from 0); an exception ends the collection."""
    versions: Callable[[], tuple[ModelVersion | None, Sequence[int]]]
    """Returns the model's version (None: the backend does not report it), and those that epochs made."""
    ahead: int
    """A job's data may come from weights up to this many updates behind the model's."""
    targets: TargetWatch

    def __post_init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._collected: dict[int, CollectionStats] = {}
        self._running: set[asyncio.Task[Any] | None] = set()
        self._latest: tuple[int, int] | None = None
        """The last epoch that had answers, and the newest version that sampled them."""

    async def run(
        self,
        examples: Sequence[Example],
        *,
        phase: str = "",
        on_episode: OnEpisode | None = None,
        **options: Any,
    ) -> EvaluationRunOutput:
        """Collect under a new phase. If there is only one kind of collection, `phase` is left out."""
        stage, number = current_part() or ("train", self.epoch())
        if stage == "train":
            self.before(number)
        key = phase_name(stage, number, phase)
        self._calls[key] += 1
        call = self._calls[key]
        collected = self._collected.setdefault(number, CollectionStats()) if stage == "train" else None

        def count_episode(episode: EpisodeRecord) -> None:
            if collected is not None:
                collected.add(episode, self.model)
                self.targets.saw(episode)
                if collected.model_versions:
                    answered = (number, max(collected.model_versions))
                    self._latest = max(answered, self._latest or answered)
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

    def stats(self, epoch: int) -> CollectionStats:
        """Return the statistics of the episodes collected for an epoch (from 0) so far."""
        return self._collected.get(epoch, CollectionStats())

    def check(self, collection: TrajectoryCollection, epoch: int) -> None:
        """Raise TrainingError if an epoch's data comes from weights over `ahead` updates before the model's.

        If the backend does not report its versions, nothing is checked.
        """
        version, made = self.versions()
        if version is None:
            return
        now = version.number
        young, calls = {now, *(0, *made)[-1 - self.ahead :]}, self.stats(epoch).model_versions
        if old := {number: count for number, count in calls.items() if number not in young}:
            listed = ", ".join(f"{count} from version {number}" for number, count in sorted(old.items()))
            is_ahead = any(number in (0, *made) for number in old)
            advice = "; were they collected with 'finetuning.collect_ahead'? Then keep it on"
            raise TrainingError(
                f"episodes of epoch {epoch + 1} were not sampled from version {now}, which the model "
                f"was at: {listed} of {sum(calls.values())} calls{advice if is_ahead else ''}"
            )
        if data_kind(collection.method) != "samples":
            return
        latest = None if self._latest is None else self._latest[1]
        if latest is not None and latest not in young:
            raise TrainingError(
                f"no episode was sampled from version {now}, which the model is at: the data of epoch "
                f"{epoch + 1} can only come from version {latest} or older. Collect in every epoch: "
                "`await self.run_eval()` plays new episodes each time it is called"
            )
        sources = chain.from_iterable(map(_versions, chain.from_iterable(collection.groups)))
        if stale := Counter(version for version in sources if version is not None and version not in young):
            listed = ", ".join(f"{count} of version {number}" for number, count in sorted(stale.items()))
            raise TrainingError(
                f"trajectories of epoch {epoch + 1} hold answers that older weights sampled, but the model "
                f"is at version {now}: {listed}. Build them from the episodes that `run_eval` or "
                "`runtime.evaluation.run` returned in this epoch"
            )

    def forget(self, epoch: int) -> None:
        """Drop an epoch's statistics."""
        self._collected.pop(epoch, None)

    async def stop(self) -> None:
        """Cancel collections that are still running, and wait until they have stopped."""
        own = asyncio.current_task()
        await end_tasks(*(task for task in self._running if task is not None and task is not own))


def _versions(unit: TrainingUnit) -> list[int | None]:
    """Return the versions that sampled a unit's answers; None for unknown ones."""
    if isinstance(unit, Trajectory):
        return [item.model_version for item in unit.episode if isinstance(item, EpisodeItem)]
    return [turn.model_version for sample in unit.samples for turn in sample.turns]


class TargetWatch:
    """Checks the episodes of the first epoch for calls by the target functions to the trained model."""

    def __init__(
        self, functions: Collection[str], model: str, warn: Callable[[str], None], target: str | None = None
    ) -> None:
        """`target` is the name of the model, if several are trained."""
        self._functions = functions
        self._model = model
        self._warn = warn
        self._key = f"finetuning.{f'targets.{target}.' if target else ''}target_functions"
        self._callers: set[str] = set()
        self._episodes = 0
        """The number of episodes with calls and an output. Failures have a cause of their own."""
        self._is_targeted = False
        self._is_over = False

    def saw(self, episode: EpisodeRecord) -> None:
        """Check an episode."""
        answered = [call for call in episode.calls if call.completion is not None]
        self._episodes += bool(answered) and episode.failure is None
        self._callers |= {call.function for call in answered if call.model == self._model} - {SIMULATED_USER}
        self._is_targeted |= any(is_targeted(call, self._functions, self._model) for call in answered)

    def epoch_over(self, *, is_empty: bool) -> None:
        """Raise RequestError if the epoch had no targeted call, and nothing was trained on (`is_empty`).

        A custom builder may train on other calls. Warns once of target functions that made no call.
        """
        if self._is_over or not self._episodes:
            return
        self._is_over = True
        callers = ", ".join(f"'{name}'" for name in sorted(self._callers)) or "none"
        if is_empty and not self._is_targeted:
            meant = filter(None, (nearest(name, self._callers) for name in self._functions))
            names = ", ".join(dict.fromkeys(meant))
            advice = f"Did you mean '{self._key}: [{names}]'?" if names else f"Name some in '{self._key}'."
            raise RequestError(
                f"none of the {self._episodes} episodes has a call to '{self._model}' by a target function "
                f"({', '.join(self._functions)}); functions that called it: {callers}"
                f". {advice if self._callers else 'Nothing could be trained on'}"
            )
        missing = [name for name in self._functions if name not in {EVERY_FUNCTION, *self._callers}]
        if missing and self._is_targeted:
            unused = f"'{self._key}' names {', '.join(missing)}, which never called '{self._model}'"
            self._warn(f"{unused} in {self._episodes} episodes; functions that called it: {callers}")

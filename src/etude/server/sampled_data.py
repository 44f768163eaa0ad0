"""The data of reinforcement jobs: answers that are sampled with the weights of each step, and graded."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

from etude.algorithms.algorithm import Algorithm
from etude.algorithms.episodes import ScoredEpisode, Tally, UnitGroup
from etude.algorithms.samples import EVERY_FUNCTION, branches_of
from etude.core.call import ChatRequest, Completion
from etude.core.errors import TrainingError
from etude.core.evaluation import EvaluationRunOutput
from etude.core.example import Example
from etude.graders.evaluator import GraderEvaluator
from etude.graders.grader import Grader
from etude.inference.embedded import EmbeddedEngine
from etude.jobs.training import Interrupted, JobTraining
from etude.learner.learner import Learner, TrainingCanceled, has_gradient, is_trained
from etude.learner.objective import Unit
from etude.learner.plan import Step, plan_steps
from etude.models.policy import Policy
from etude.rewards.evaluation_run import EvaluationRun
from etude.rollout.collector import Collector, Limits
from etude.rollout.episode import Episode
from etude.rollout.workflow import as_workflow
from etude.server.reinforcement import answers_of, constraint_of, grader_of
from etude.store.journal import Journal

T = TypeVar("T")

_MODEL = "policy"
_REWARD = "reward"
_LOOK_SECONDS = 0.2
_GRADE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Prompts:
    """The rows that a job samples answers to, as examples whose inputs are the columns of a row."""

    training: Sequence[Example]
    validation: Sequence[Example] = ()


class EngineLimits(TypedDict):
    """Those of `EmbeddedEngine`."""

    max_batch: int
    max_tokens: int


class _Engine(EmbeddedEngine):
    """Samples from the policy in training, with options for its chat template."""

    options: Mapping[str, Any] = {}

    async def complete(self, request: ChatRequest) -> Completion:
        options = {**request.template_options, **self.options}
        return await super().complete(replace(request, template_options=options))


async def answer(example: Example, episode: Episode) -> str:
    """The workflow: one answer to the prompt of a row."""
    reply = await episode.chat(example.inputs["messages"], tools=example.inputs.get("tools"))
    return reply.text or ""


class SampledData:
    """Samples the data of each step when it is due. Every answer and grade is kept in a journal, so that a
    job that was killed or paused goes on with those that it had.

    On a CPU the engine is deterministic, so that it does not matter to an answer which others it is
    sampled with, and a job that was interrupted ends with the weights of one that was not.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        algorithm: Algorithm,
        policy: Policy,
        prompts: Prompts,
        judges: Mapping[str, EmbeddedEngine],
        journal: Path,
        canceled: Event,
        stopping: Event,
        **engine: Unpack[EngineLimits],
    ) -> None:
        """`job` is a row of the database, `judges` are those of its grader, `engine` has the limits of the
        engine that samples.

        Raises TrainingError for a reasoning effort that the model's chat template does not know.
        """
        self.objective = self._algorithm = algorithm
        self._job, self._values, self._prompts, self._policy = job, job["hyperparameters"], prompts, policy
        self._canceled, self._stopping = canceled, stopping
        self._engine = _Engine(policy, deterministic=policy.device.type == "cpu", **engine)
        self._engine.options = _template_options(self._values["reasoning_effort"], policy)
        self._sampling = {
            "temperature": self._values["temperature"],
            "max_tokens": self._values["max_tokens"],
            "constraint": constraint_of(job["options"].get("response_format")),
        }
        self._runner = asyncio.Runner()
        self._journal = Journal(journal)
        self._judges = judges
        grader = Grader(grader_of(job["options"]), {name: judge.complete for name, judge in judges.items()})
        width = engine["max_batch"]
        collector = Collector(
            as_workflow(answer),
            {_MODEL: self._engine},
            self._journal,
            seed=job["seed"],
            limits=Limits(max_concurrency=width, timeout=None),
        )
        # Sandbox and judges have limits of their own, and the time here has that in their queues in it.
        self._evaluation = EvaluationRun(
            collector,
            {_REWARD: GraderEvaluator(grader)},
            self._journal,
            timeout=_GRADE_SECONDS,
            max_concurrency=width,
        )
        self._metrics: dict[str, float] = {}
        """Of the step that is under way."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in (self._engine, *self._judges.values()):
            self._runner.run(engine.close())
        self._journal.close()
        self._runner.close()

    def plan(self) -> list[Step]:
        """The steps of the job."""
        live, values = [True] * len(self._prompts.training), self._values
        return plan_steps(live, values["n_epochs"], values["batch_size"], self._job["seed"], "epoch")

    def units(self, step: Step) -> list[Unit]:
        """Sample and grade the answers of a step; those that are learned from.

        Raises TrainingCanceled, and Interrupted where the job is to make way; ErrorBudgetExceeded when too
        many answers or grades failed.
        """
        self._policy.mark_changed(step.number - 1)
        examples = [self._prompts.training[row] for row in step.rows]
        output = self._play(f"step-{step.number}", examples, answers_of(self._values))
        groups = [UnitGroup(self._algorithm.samples(each, Tally())) for each in _groups(output)]
        counts = has_gradient if self._algorithm.skips_idle else is_trained
        units: list[Unit] = [*filter(counts, self._algorithm.units([group.units for group in groups])[0])]
        self._metrics = {
            **_rewards("train", output),
            "flat_groups": float(self._algorithm.compared(groups).count(False)),
            "trained_tokens": float(sum(sum(sample.mask) for unit in units for sample in unit)),
        }
        return units

    def largest(self, steps: Sequence[Step]) -> list[Unit]:
        """None: what a step learns from is sampled in it."""
        return []

    def known(self) -> list[Unit]:
        """None either."""
        return []

    def measure(self, step: Step, learner: Learner) -> dict[str, float]:
        """The rewards of the step and, where it is time for that, those of the validation file after it."""
        self._policy.mark_changed(step.number)
        every, metrics = self._values["eval_interval"], dict(self._metrics)
        due = step.number % every == 0 if every else step.ends_epoch
        if self._prompts.validation and due:
            name = f"validation-{step.number}"
            output = self._play(name, self._prompts.validation, self._values["eval_samples"])
            metrics |= _rewards("valid", output)
        return metrics

    def trained(self, training: JobTraining) -> int:
        """The tokens of all steps that were trained on."""
        return round(sum(metrics["trained_tokens"] for metrics in training.history))

    def _play(self, phase: str, examples: Sequence[Example], answers: int) -> EvaluationRunOutput:
        given = {name: value for name, value in self._sampling.items() if value is not None}
        return self._runner.run(
            self._unless_over(
                self._evaluation.run(examples, phase=phase, generations=answers, sampling=given)
            )
        )

    async def _unless_over(self, work: Awaitable[T]) -> T:
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_SECONDS)
            if self._canceled.is_set() or self._stopping.is_set():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise TrainingCanceled("canceled while sampling") if self._canceled.is_set() else Interrupted
        return await task


def _template_options(effort: str, policy: Policy) -> dict[str, Any]:
    if effort == "default":
        return {}
    if "reasoning_effort" not in str(policy.tokenizer.chat_template):
        raise TrainingError("the model's chat template does not know reasoning_effort; leave it out")
    return {"reasoning_effort": effort}


def _groups(output: EvaluationRunOutput) -> list[list[ScoredEpisode]]:
    """The graded answers by their prompts. Those without a grade are left out."""
    scores = {
        (item.id, item.generation): item.score
        for _, result in output.evaluation_results
        for item in result.eval_output_items
        if item.is_scored
    }
    groups: dict[str, list[ScoredEpisode]] = defaultdict(list)
    for item in output.eval_input.eval_input_items:
        score = scores.get((item.id, item.generation))
        if item.episode is not None and score is not None:
            branches = tuple(branches_of(item.episode, (EVERY_FUNCTION,), _MODEL))
            groups[item.id].append(ScoredEpisode(item.episode, score, branches))
    return [*groups.values()]


def _rewards(name: str, output: EvaluationRunOutput) -> dict[str, float]:
    scores = output.scores()[_REWARD]
    episodes = [item.episode for item in output.eval_input.eval_input_items if item.episode is not None]
    completions = [call.completion for episode in episodes for call in episode.calls]
    tokens = sum(each.usage.completion_tokens for each in completions if each is not None)
    return {
        f"{name}_mean_reward": sum(scores) / max(len(scores), 1),
        f"{name}_answers": float(len(scores)),
        f"{name}_failed_answers": float(sum(output.failures.values())),
        f"{name}_tokens_per_answer": tokens / max(len(completions), 1),
    }

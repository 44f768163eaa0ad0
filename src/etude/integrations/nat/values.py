"""Values of the two sides: the toolkit's carry Etude's, so that nothing of them is lost on the way."""

from __future__ import annotations

from typing import Any

from nat.data_models.evaluate_runtime import EvaluationRunOutput, ProfilerResults, UsageStats
from nat.data_models.evaluator import EvalInput
from nat.data_models.finetuning import (
    DPOItem,
    EpisodeItem,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from nat.plugins.eval.data_models.evaluator_io import EvalOutput, EvalOutputItem
from pydantic import PrivateAttr

from etude.core import evaluation, job, trajectory
from etude.core.errors import RequestError
from etude.core.job import Skipped
from etude.integrations.nat.evaluation import item_of


class RecordedTrajectory(Trajectory):
    """A trajectory of the toolkit's that knows the tokens it was made of, and what it was made for."""

    _recorded: trajectory.Trajectory = PrivateAttr()
    _source: trajectory.TrajectoryCollection = PrivateAttr()
    """The collection without its trajectories: the algorithm and its options."""


def to_toolkit(collection: trajectory.TrajectoryCollection) -> TrajectoryCollection:
    """A collection as the toolkit knows it."""
    source = collection.model_copy(update={"trajectories": []})
    groups = [[_trajectory(each, source) for each in group] for group in collection.trajectories]
    return TrajectoryCollection(trajectories=groups, run_id=collection.run_id)


def from_toolkit(collection: TrajectoryCollection) -> trajectory.TrajectoryCollection:
    """A collection with its tokens; what was left out or rewarded otherwise since then stays so.

    Raises RequestError for trajectories that Etude did not record, or for several algorithms.
    """
    groups = [[_checked(each) for each in group] for group in collection.trajectories]
    sources = {each._source.method: each._source for group in groups for each in group}
    if len(sources) > 1:
        raise RequestError(
            f"trajectories of several algorithms in one collection: {', '.join(sorted(sources))}"
        )
    source = next(iter(sources.values()), trajectory.TrajectoryCollection(run_id=collection.run_id))
    recorded = [[_recorded(each) for each in group] for group in groups]
    return source.model_copy(update={"trajectories": recorded, "run_id": collection.run_id})


def job_to_toolkit(ref: job.TrainingJobRef) -> TrainingJobRef:
    """A job as the toolkit names it."""
    return TrainingJobRef(**ref.model_dump(mode="json"))


def job_from_toolkit(ref: TrainingJobRef) -> job.TrainingJobRef:
    """The same, back."""
    return job.TrainingJobRef(**ref.model_dump(mode="json"))


def skipped_to_toolkit(skipped: Skipped, run_id: str, backend: str) -> TrainingJobRef:
    """A job that was not worth its while; the toolkit has no word for it but its metadata."""
    return TrainingJobRef(run_id=run_id, backend=backend, metadata={"skipped": skipped.reason})


def status_to_toolkit(status: job.TrainingJobStatus) -> TrainingJobStatus:
    """A status as the toolkit knows it. A job that is not there has failed."""
    fields = status.model_dump(mode="json")
    if status.status is job.TrainingStatusEnum.NOT_FOUND:
        message = status.message or "there is no such job"
        fields |= {"status": TrainingStatusEnum.FAILED, "message": message}
    return TrainingJobStatus(**fields)


def evaluation_to_toolkit(output: evaluation.EvaluationRunOutput) -> EvaluationRunOutput:
    """The output of an evaluation run, without the files that the toolkit's own write."""
    results = [
        (name, EvalOutput(average_score=scores.average_score, eval_output_items=_scores(scores)))
        for name, scores in output.evaluation_results
    ]
    # `full_dataset_entry` of an item here is its example.
    items = [
        item_of(item.full_dataset_entry, item.output_obj, []) for item in output.eval_input.eval_input_items
    ]
    return EvaluationRunOutput(
        workflow_output_file=None,
        evaluator_output_files=[],
        workflow_interrupted=output.workflow_interrupted,
        eval_input=EvalInput(eval_input_items=items),
        evaluation_results=results,
        usage_stats=UsageStats(),
        profiler_results=ProfilerResults(),
    )


def _trajectory(
    recorded: trajectory.Trajectory, source: trajectory.TrajectoryCollection
) -> RecordedTrajectory:
    known = RecordedTrajectory(
        episode=[_episode_item(item) for item in recorded.episode],
        reward=recorded.reward,
        shaped_rewards=recorded.shaped_rewards,
        metadata=recorded.metadata,
    )
    known._recorded, known._source = recorded, source
    return known


def _checked(given: Trajectory) -> RecordedTrajectory:
    if not isinstance(given, RecordedTrajectory):
        raise RequestError(
            "a trajectory has no recorded tokens: `etude_trainer_adapter` trains on what "
            "`etude_traj_builder` collects"
        )
    return given


def _recorded(given: RecordedTrajectory) -> trajectory.Trajectory:
    rewards = {"reward": given.reward, "shaped_rewards": given.shaped_rewards}
    return given._recorded.model_copy(update=rewards)


def _episode_item(item: trajectory.EpisodeItem | trajectory.DPOItem) -> EpisodeItem | DPOItem:
    if isinstance(item, trajectory.DPOItem):
        prompt = (
            item.prompt if isinstance(item.prompt, str) else [_message(message) for message in item.prompt]
        )
        return DPOItem(
            prompt=prompt, chosen_response=item.chosen_response, rejected_response=item.rejected_response
        )
    return EpisodeItem(
        role=item.role.value, content=item.content, logprobs=item.logprobs, metadata=item.metadata
    )


def _message(message: Any) -> dict[str, str]:
    return {"role": message.role, "content": message.content or ""}


def _scores(output: evaluation.EvalOutput) -> list[EvalOutputItem]:
    return [
        EvalOutputItem(id=item.id, score=item.score, reasoning=item.reasoning, error=item.error)
        for item in output.eval_output_items
    ]

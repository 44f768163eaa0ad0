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
from etude.core.evaluation import EvalInputItem
from etude.core.skipped import Skipped
from etude.integrations.nat.examples import item_of


class RecordedTrajectory(Trajectory):
    """A trajectory of the toolkit's that knows the tokens it was made of."""

    _recorded: trajectory.Trajectory = PrivateAttr()
    _method: trajectory.Method = PrivateAttr()


def to_toolkit(collection: trajectory.TrajectoryCollection) -> TrajectoryCollection:
    """A collection as the toolkit knows it."""
    groups = [[_trajectory(one, collection.method) for one in group] for group in collection.trajectories]
    return TrajectoryCollection(trajectories=groups, run_id=collection.run_id)


def from_toolkit(collection: TrajectoryCollection) -> trajectory.TrajectoryCollection:
    """A collection with its tokens; what was left out or rewarded otherwise since then stays so.

    Raises RequestError for trajectories that Etude did not record, or for several methods.
    """
    groups = [[_checked(one) for one in group] for group in collection.trajectories]
    methods = {one._method for group in groups for one in group} or {"grpo"}
    if len(methods) > 1:
        raise RequestError(f"trajectories of several methods in one collection: {', '.join(sorted(methods))}")
    return trajectory.TrajectoryCollection(
        trajectories=[[_recorded(one) for one in group] for group in groups],
        run_id=collection.run_id,
        method=methods.pop(),
    )


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
    told = status.model_dump(mode="json")
    if status.status is job.TrainingStatusEnum.NOT_FOUND:
        told |= {"status": TrainingStatusEnum.FAILED, "message": told["message"] or "there is no such job"}
    return TrainingJobStatus(**told)


def evaluation_to_toolkit(output: evaluation.EvaluationRunOutput) -> EvaluationRunOutput:
    """What an evaluation run gave, without the files that the toolkit's own write."""
    results = [
        (name, EvalOutput(average_score=found.average_score, eval_output_items=_scores(found)))
        for name, found in output.evaluation_results
    ]
    items = [_item(one) for one in output.eval_input.eval_input_items]
    return EvaluationRunOutput(
        workflow_output_file=None,
        evaluator_output_files=[],
        workflow_interrupted=output.workflow_interrupted,
        eval_input=EvalInput(eval_input_items=items),
        evaluation_results=results,
        usage_stats=UsageStats(),
        profiler_results=ProfilerResults(),
    )


def _trajectory(one: trajectory.Trajectory, method: trajectory.Method) -> RecordedTrajectory:
    made = RecordedTrajectory(
        episode=[_episode_item(item) for item in one.episode],
        reward=one.reward,
        shaped_rewards=one.shaped_rewards,
        metadata=one.metadata,
    )
    made._recorded, made._method = one, method
    return made


def _checked(one: Trajectory) -> RecordedTrajectory:
    if not isinstance(one, RecordedTrajectory):
        raise RequestError(
            "a trajectory has no recorded tokens: `etude_trainer_adapter` trains on what "
            "`etude_traj_builder` collects"
        )
    return one


def _recorded(one: RecordedTrajectory) -> trajectory.Trajectory:
    return one._recorded.model_copy(update={"reward": one.reward, "shaped_rewards": one.shaped_rewards})


def _episode_item(item: trajectory.EpisodeItem | trajectory.DPOItem) -> EpisodeItem | DPOItem:
    if isinstance(item, trajectory.DPOItem):
        prompt = item.prompt if isinstance(item.prompt, str) else [_message(one) for one in item.prompt]
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
        EvalOutputItem(id=one.id, score=one.score, reasoning=one.reasoning, error=one.error)
        for one in output.eval_output_items
    ]


def _item(item: EvalInputItem) -> Any:
    """`full_dataset_entry` of an item here is its example."""
    return item_of(item.full_dataset_entry, item.output_obj, [])

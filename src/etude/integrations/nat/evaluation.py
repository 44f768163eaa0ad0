"""Conversion of examples, scores and jobs between the toolkit and Etude."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from nat.data_models.dataset_handler import (
    EvalDatasetBaseConfig,
    EvalDatasetCustomConfig,
    EvalDatasetJsonConfig,
)
from nat.data_models.evaluator import EvalInput
from nat.data_models.evaluator import EvalInputItem as NatItem
from nat.data_models.finetuning import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from nat.plugins.eval.dataset_handler.dataset_handler import DatasetHandler
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator
from nat.plugins.eval.runtime.atif_adapter import EvalAtifAdapter
from nat.plugins.eval.utils.intermediate_step_adapter import IntermediateStepAdapter
from pydantic_core import to_jsonable_python

from etude.core import job
from etude.core.episode import Example
from etude.core.errors import DatasetError, EpisodeError, RequestError
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Evaluator
from etude.core.job import Skipped
from etude.core.json_text import exact_value
from etude.core.keys import content_hash
from etude.integrations.nat.agent import NatAgent
from etude.integrations.nat.transport import read_steps


class NatDataset:
    """The examples of a toolkit dataset, read by the toolkit."""

    def __init__(self, general: Any, file: Path | None = None) -> None:
        """Create the dataset. `general` is the toolkit's `eval.general`; `file` replaces its data file."""
        self._general = general
        self._file = file

    def examples(self) -> list[Example]:
        """Return all examples, in order. Raises DatasetError for unreadable data and repeated ids."""
        config = self._config()
        source = f"the dataset {config.file_path}"
        handler = DatasetHandler(config, reps=1, concurrency=self._general.max_concurrency, num_passes=0)
        other = str(self._file) if self._file and isinstance(config, EvalDatasetCustomConfig) else None
        try:
            items = handler.get_eval_input_from_dataset(other).eval_input_items
        except Exception as error:
            raise DatasetError(f"{source} cannot be read by the toolkit: {error!r}") from error
        if not items:
            raise DatasetError(f"{source} holds no examples with a question")
        examples: list[Example] = []
        for item in items:
            row = to_jsonable_python(item.full_dataset_entry, fallback=exact_value, inf_nan_mode="null")
            # Without an id, the id is a hash of the content.
            name = content_hash([item.input_obj, row]) if item.id in ("", None) else str(item.id)
            inputs = {"question": item.input_obj, "row": row}
            if item.expected_trajectory:
                inputs["expected_trajectory"] = item.expected_trajectory
            examples.append(Example(name, inputs, item.expected_output_obj))
        if len({example.id for example in examples}) < len(examples):
            raise DatasetError(f"{source}: two rows have the same id in '{config.id_key}'")
        return examples

    def _config(self) -> EvalDatasetBaseConfig:
        """Return the dataset's config with the other file. The toolkit itself would read it as JSON."""
        config = self._general.dataset
        if config is None and self._file is None:
            raise DatasetError("the config has no dataset; add `eval.general.dataset`, or give --dataset")
        if self._file is None or isinstance(config, EvalDatasetCustomConfig):
            return config
        return (config or EvalDatasetJsonConfig()).model_copy(update={"file_path": self._file})


class NatEvaluator(Evaluator):
    """One of the toolkit's evaluators, called for one episode at a time."""

    def __init__(self, agent: NatAgent, name: str) -> None:
        """Look up the evaluator. Raises RequestError if it is unknown or has no evaluate function."""
        known = agent.config.eval.evaluators
        if name not in known:
            raise RequestError(f"there is no evaluator '{name}'; there are: {', '.join(known) or 'none'}")
        self._agent = agent
        self._name = name
        evaluator: Any = agent.builder.get_evaluator(name)
        self._atif: Any = getattr(evaluator, "evaluate_atif_fn", None)
        self._plain: Any = getattr(evaluator, "evaluate_fn", None)
        if self._atif is None and self._plain is None:
            raise RequestError(f"the evaluator '{name}' has no function to evaluate with")

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Score one episode. A failed evaluator gives an error instead of the toolkit's score 0.0."""
        output = await self._evaluate(self._to_item(item))
        error = output.error
        if error is None and isinstance(output.reasoning, dict):
            # The toolkit's mark for an evaluator that raised. Other evaluators may have a key `error` too.
            reason = str(output.reasoning.get("error"))
            error = reason if reason.startswith("Evaluator error: ") else None
        return EvalOutputItem.model_construct(
            id=item.id,
            generation=item.generation,
            score=output.score,
            reasoning=output.reasoning,
            error=error,
        )

    def _to_item(self, item: EvalInputItem) -> NatItem:
        """Return the episode in the form that the toolkit's evaluations pass to evaluators."""
        assert item.episode is not None, "a score is made of an episode"
        journal = self._agent.journal
        kept = [] if journal is None else read_steps(journal, item.episode.id)
        example = item.episode.example
        prepared = NatItem(
            id=example.id,
            input_obj=example.inputs["question"],
            expected_output_obj=example.expected,
            output_obj=item.output_obj,
            expected_trajectory=example.inputs.get("expected_trajectory", []),
            trajectory=IntermediateStepAdapter().validate_intermediate_steps(kept),
            full_dataset_entry=example.inputs["row"],
        )
        general = self._agent.config.eval.general
        process = general.output.custom_pre_eval_process_function if general.output else None
        if process is None:
            return prepared
        handler = DatasetHandler(general.dataset, 1, 1, custom_pre_eval_process_function=process)
        return handler.pre_eval_process_eval_input(EvalInput(eval_input_items=[prepared])).eval_input_items[0]

    async def _evaluate(self, item: NatItem) -> Any:
        batch = EvalInput(eval_input_items=[item])
        if self._atif is not None:
            outputs = await self._atif(EvalAtifAdapter().build_samples(batch))
        elif isinstance(owner := getattr(self._plain, "__self__", None), BaseEvaluator):
            # `evaluate` would draw a progress bar for every episode, and hide exceptions.
            return await owner.evaluate_item(item)
        else:
            result = self._plain(batch)
            outputs = await result if inspect.isawaitable(result) else result
        items = getattr(outputs, "eval_output_items", [])
        if len(items) != 1:
            raise EpisodeError(f"the evaluator '{self._name}' gave {len(items)} scores for one episode")
        return items[0]


def job_to_toolkit(ref: job.TrainingJobRef | Skipped, run_id: str, backend: str) -> TrainingJobRef:
    """Convert a job reference to the toolkit's type. The metadata gives the reason of a skipped job."""
    if isinstance(ref, Skipped):
        return TrainingJobRef(run_id=run_id, backend=backend, metadata={"skipped": ref.reason})
    return TrainingJobRef(**ref.model_dump(mode="json"))


def status_to_toolkit(status: job.TrainingJobStatus) -> TrainingJobStatus:
    """Convert a status to the toolkit's type. The version is in the metadata; unknown jobs have failed."""
    fields = status.model_dump(mode="json")
    if (version := fields.pop("version")) is not None:
        fields["metadata"] = {**(status.metadata or {}), "model_version": version}
    if status.status is job.TrainingStatusEnum.NOT_FOUND:
        message = status.message or "there is no such job"
        fields |= {"status": TrainingStatusEnum.FAILED, "message": message}
    return TrainingJobStatus(**fields)

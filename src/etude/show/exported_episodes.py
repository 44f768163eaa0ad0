"""The episodes of a stored run: trajectories rebuilt from them as rows, and readable transcripts.

A play is shown as a transcript of its protocol. Other episodes are shown as calls and events in order, with
their result.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from etude.algorithms.episodes import is_play
from etude.algorithms.trajectory_builder import TrajectoryBuilder
from etude.config.builder import Builder
from etude.config.finetuning import RewardFunctionConfig
from etude.config.load import parse_config
from etude.config.schema import Config
from etude.core.conversion import TrajectoryCollection
from etude.core.data_model import finite
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.evaluation import EvalInput, EvalOutputItem, EvaluationRunOutput
from etude.core.json_text import jsonable
from etude.core.trajectory import Method
from etude.protocols.tree import as_yaml, transcript
from etude.rollout.collections import collection_phase, phase_name
from etude.rollout.evaluation import Evaluation, EvaluationRequest, make_item, summarise
from etude.rollout.evaluator import unscored
from etude.rollout.scorer import read_score
from etude.runtime import Runtime
from etude.show.turns import list_turns
from etude.store.episodes import episode_scores, iter_episodes, list_phases, phase_epoch, read_episode
from etude.store.files import open_draft, open_private
from etude.store.journal import Journal
from etude.store.run_folder import RunFolder
from etude.store.stored_config import (
    list_evaluators,
    reward_names,
    stored_data,
    target_names,
    without_secrets,
)

BUILDERS: dict[Method, str] = {"grpo": "grpo", "dpo": "dpo", "supervised": "expert_iteration"}
"""The shipped builder for each method."""


@dataclass(frozen=True, slots=True)
class PhaseTrajectories:
    """The trajectories from the episodes of one epoch, or of another phase."""

    phase: str
    collection: TrajectoryCollection
    target: str | None = None
    """The target's name, if a run trains several models."""


async def read_trajectories(run: RunFolder, method: Method | None = None) -> AsyncIterator[PhaseTrajectories]:
    """Yield the trajectories of each training epoch, or of an evaluation, in order.

    They come from the run's own trajectory builder, before the curriculum. With `method`, they come from the
    shipped builder for it. Nothing is sampled or scored. Raises RequestError if the run has no episodes.
    """
    data = stored_data(run.path)
    for target in target_names(data):
        config = _config(data, method, target)
        finetuning = config.finetuning
        async with Builder(config, run) as builder:
            trajectory_builder: TrajectoryBuilder = await builder.get_trajectory_builder(
                next(iter(config.trajectory_builders))
            )
            for number, (epoch, phases) in enumerate(_by_epoch(run)):
                # Another method's builder takes everything collected, however many collections there were.
                called = epoch if method is None else None
                evaluation = StoredEvaluation(run.journal, phases, list_evaluators(data), called)
                runtime = Runtime(config, run, builder, evaluation, (), {}, finetuning.target_model or "")
                made = number if epoch is None else epoch
                name, meta = f"{run.name}-{made}", {"epoch": made}
                trajectory_builder.bind_runtime(runtime)
                await trajectory_builder.initialize(finetuning)
                await trajectory_builder.start_run(run_id=name, meta=meta)
                collection = await trajectory_builder.finalize(run_id=name, meta=meta)
                yield PhaseTrajectories(phases[0], collection, target)
            await trajectory_builder.cleanup()


def _by_epoch(run: RunFolder) -> list[tuple[int | None, list[str]]]:
    """Return the phases of each epoch in order, or each phase alone if the run never trained."""
    phases = list_phases(run.journal)
    if not phases:
        raise RequestError(f"run {run.name} has no episodes yet")
    trained = groupby((phase for phase in reversed(phases) if phase_epoch(phase) is not None), phase_epoch)
    return [(epoch, list(names)) for epoch, names in trained] or [(None, [phase]) for phase in phases]


def _config(data: dict[str, Any], method: Method | None, target: str | None) -> Config:
    """Return the parts of the run's config that builders need. Its agent and models need not exist."""
    finetuning = data.get("finetuning") or {}
    # A target's block is complete. The run's own block names the model by another key.
    block = finetuning | ((finetuning.get("targets") or {}).get(target) or {})
    builders = without_secrets(data.get("trajectory_builders") or {})
    name = str(block.get("trajectory_builder"))
    chosen = builders.get(name) or {}
    if method is not None and chosen.get("_type") != BUILDERS[method]:
        chosen = {"_type": BUILDERS[method], "num_generations": chosen.get("num_generations", 8)}
    settings = finetuning.get("run_configuration") or {}
    config = parse_config(
        {
            "trajectory_builders": {name: chosen},
            "finetuning": {
                "target_functions": block.get("target_functions") or ["<workflow>"],
                "run_configuration": {"config_file": settings.get("config_file")},
            },
        }
    )
    reward = (block.get("reward_function") or {}).get("name")
    if reward is None:
        raise RequestError("the run's config names no reward function, so its episodes have no rewards")
    # Set after parsing, because this config lacks the entries that they name.
    config.finetuning.reward_function = RewardFunctionConfig(name=reward)
    config.finetuning.target_model = block.get("target_model") if target is None else block.get("model")
    return config


class StoredEvaluation(Evaluation):
    """A run's stored evaluation of one epoch. Builders rebuild the run's trajectories from it."""

    def __init__(
        self, journal: Journal, phases: Sequence[str], evaluators: Sequence[str], epoch: int | None = None
    ) -> None:
        """`phases` are read all at once, or with an `epoch` each by the call that made it. `evaluators` are
        the names of the scores."""
        self._journal = journal
        self._phases = phases
        self._evaluators = evaluators
        self._epoch = epoch
        self._calls: Counter[str] = Counter()

    async def answer(self, request: EvaluationRequest) -> EvaluationRunOutput:
        """Return all stored episodes with their scores. Only the request's phase matters."""
        phases = self._asked_for(request.phase)
        records = [record for name in phases for record in iter_episodes(self._journal, phase=name)]
        # The sort is stable, so several collections of an example stay in order.
        records.sort(key=lambda record: (record.example.id, record.generation))
        if len(phases) > 1:  # Episodes of several collections become generations of one.
            groups = groupby(records, key=lambda record: record.example.id)
            records = [replace(each, generation=at) for _, group in groups for at, each in enumerate(group)]
        scores = {name: [self._score(record, name) for record in records] for name in self._evaluators}
        failures = Counter(record.failure.kind for record in records if record.failure is not None)
        return EvaluationRunOutput(
            eval_input=EvalInput(eval_input_items=[make_item(record) for record in records]),
            evaluation_results=[(name, summarise(items)) for name, items in scores.items()],
            workflow_interrupted=bool(failures),
            failures=dict(failures),
        )

    def _asked_for(self, label: str) -> Sequence[str]:
        """Return the phases for a call with this label: the phase that the same call made in the run."""
        if self._epoch is None:
            return self._phases
        key = phase_name("train", self._epoch, label)
        self._calls[key] += 1
        if key in self._phases:
            # A phase that had not begun when the run stopped has no episodes.
            return [collection_phase(key, self._calls[key])]
        return self._phases if self._calls[key] == 1 else []

    def _score(self, record: EpisodeRecord, evaluator: str) -> EvalOutputItem:
        """Return the stored score, or an item that says why there is none."""
        if record.failure is None:
            score = read_score(self._journal, record, evaluator)
            error = "not scored before the run was stopped"
        else:
            score, error = None, f"{record.failure.kind}: {record.failure.reason}"
        return score or unscored(make_item(record), error)


async def write_jsonl(path: Path, run: RunFolder, phases: AsyncIterator[PhaseTrajectories]) -> int:
    """Write a line per trajectory: `run`, `phase`, `target` (if there are several), `group`, `method` and its
    own fields. Return the number of lines.

    Raises StoreError. The file appears complete or not at all.
    """
    written = 0
    with open_draft(path) as draft, open_private(draft, "w") as file:
        async for phase in phases:
            whole = {"run": run.name, "phase": phase.phase, "target": phase.target}
            whole |= {"method": phase.collection.method}
            for number, group in enumerate(phase.collection.trajectories):
                for trajectory in group:
                    row = whole | {"group": number} | trajectory.model_dump(mode="json")
                    file.write(
                        json.dumps(finite(row), ensure_ascii=False, allow_nan=False, default=str) + "\n"
                    )
                    written += 1
    return written


def episode_transcript(run: RunFolder, episode: str) -> str:
    """Return an episode's transcript as YAML. Raises RequestError if there is no such episode."""
    record = read_episode(run.journal, episode)
    if record is None:
        raise RequestError(
            f"run {run.name} has no episode '{episode}'; an episode is named by its phase, example and "
            f"generation. `etude episodes {run.path}` lists them"
        )
    if is_play(record):
        shown = transcript(record)
    else:
        inputs, expected = jsonable(dict(record.example.inputs)), jsonable(record.example.expected)
        shown = {"episode": record.id, "example": record.example.id, "inputs": inputs, "expected": expected}
        shown["turns"] = [turn.as_json() for turn in list_turns(record)]
        if record.failure is None:
            shown["output"] = jsonable(record.output)
        else:
            shown["failure"] = f"{record.failure.kind}: {record.failure.reason}"
    stored = episode_scores(run.journal, record.id)
    rewarded = reward_names(stored_data(run.path, required=False)).get(None, "")
    if (reward := stored.get(rewarded, {}).get("score")) is not None:
        shown["reward"] = reward
    if stored:
        shown["scores"] = {
            name: row["score"]
            if not (row.get("reasoning") or row.get("error"))
            else {key: row[key] for key in ("score", "reasoning", "error") if row.get(key) is not None}
            for name, row in stored.items()
        }
    return as_yaml(shown)

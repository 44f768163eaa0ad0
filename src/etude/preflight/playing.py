"""Playing a few episodes before a run, to measure what one takes."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from etude.algorithms.algorithm import groups_of
from etude.algorithms.collecting import Collecting, CollectingBuilder
from etude.config.builder import Builder, TargetBuilder
from etude.config.finetuning import FinetuneConfig
from etude.config.schema import Config
from etude.core.errors import EtudeError, RequestError
from etude.core.evaluation import EvaluationRunOutput
from etude.core.sample import SampleOrPair
from etude.loop.training_data import TargetWatch
from etude.preflight.algorithm_trial import fault_of, is_own, try_loss
from etude.preflight.estimate import blocks_of
from etude.preflight.finding import Findings
from etude.preflight.spending import PerEpisode, measured
from etude.runtime import Runtime, open_runtime
from etude.store.episodes import iter_episodes
from etude.store.run_folder import RunFolder


async def play_some(config: Config, episodes: int, findings: Findings) -> PerEpisode:
    """The averages of so many episodes of training, played and scored in a folder that is deleted.

    Raises what a run does: also where no call in them is by a target function.
    """
    config = config.model_copy(update={"storage": None, "metrics": None})
    with (
        tempfile.TemporaryDirectory(prefix="etude-check-") as folder,
        RunFolder.create(Path(folder), "played") as run,
    ):
        async with open_runtime(config, run) as runtime:
            own = [each for each in config.trajectory_builders.values() if is_own(each)]
            # A user's own algorithm is tried on them: it compares several of an example.
            together = min(episodes, max((each.num_generations for each in own), default=1))
            examples = runtime.examples[: -(-episodes // together)]
            generations = -(-episodes // max(len(examples), 1))
            output = await runtime.evaluation.run(
                examples, phase="train/1", generations=generations, keep_episodes=bool(own)
            )
            for name, block in blocks_of(config.finetuning).items() if own else ():
                builder = runtime.builder if name is None else TargetBuilder(runtime.builder, name)
                await _try_algorithm(builder, block, runtime, output)
        for name, block in blocks_of(config.finetuning).items():
            if block.enabled:
                _check_targets(config, name, block, run, findings)
        averages = measured(run)
        if averages is None:
            raise RequestError(
                "no model was asked in the episodes that were played: there is nothing to measure"
            )
        counted = f"calls and tokens as in {averages.episodes} episodes that were played now"
        return replace(averages, assumptions=(f"{counted}, with the models as they are before training",))


async def _try_algorithm(
    builder: Builder, block: FinetuneConfig, runtime: Runtime, output: EvaluationRunOutput
) -> None:
    """Have a user's own algorithm make samples of what was played, and a step's loss of them.

    Raises RequestError that names what it raised or returned.
    """
    collecting = await builder.get_trajectory_builder(str(block.trajectory_builder))
    if not isinstance(collecting, CollectingBuilder) or not is_own(collecting.algorithm):
        return

    async def played() -> EvaluationRunOutput:
        return output

    collecting.bind_runtime(runtime)
    await collecting.initialize(block.model_copy(deep=True))
    collecting.evaluation_runs["check"] = asyncio.create_task(played())
    try:
        collection = await collecting.finalize("check", {"epoch": 0})
    except Exception as error:
        raise fault_of(collecting.algorithm, error) from error
    groups: list[list[SampleOrPair]] = []
    with suppress(EtudeError):  # Texts without tokens: where these are needed is looked at elsewhere.
        groups = groups_of(collection, collecting.algorithm)
    try_loss(collecting.algorithm, groups)


def _check_targets(
    config: Config, target: str | None, block: FinetuneConfig, run: RunFolder, findings: Findings
) -> None:
    """Raise RequestError where no call in the episodes of a run is one that a target is trained on."""
    warnings: list[str] = []
    watch = TargetWatch(block.target_functions, str(block.target_model), warnings.append, target)
    for episode in iter_episodes(run.journal):
        watch.saw(episode)
    # A builder of one's own may train on other calls.
    builder = config.trajectory_builders[str(block.trajectory_builder)]
    watch.epoch_over(is_empty=isinstance(builder, Collecting))
    for warning in warnings:
        findings.warn("target functions", warning)

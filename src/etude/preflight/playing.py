"""Playing a few episodes before a run, to measure what one takes."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from etude.algorithms.collecting import Collecting
from etude.config.finetuning import FinetuneConfig
from etude.config.schema import Config
from etude.core.errors import RequestError
from etude.loop.checks import TargetWatch
from etude.preflight.estimate import blocks_of
from etude.preflight.finding import Findings
from etude.preflight.spending import PerEpisode, halfway, measured
from etude.runtime import open_runtime
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
            examples = runtime.examples[:episodes]
            generations = -(-episodes // max(len(examples), 1))
            await runtime.evaluation.run(
                examples, phase="train/1", generations=generations, keep_episodes=False
            )
        for name, block in blocks_of(config.finetuning).items():
            if block.enabled:
                _check_targets(config, name, block, run, findings)
        averages = measured(run)
        if averages is None:
            raise RequestError(
                "no model was asked in the episodes that were played: there is nothing to measure"
            )
        counted = f"calls and tokens as in {averages.episodes} episodes that were played now"
        reward = config.finetuning.reward_function
        learned = halfway(averages, run, reward.name) if config.finetuning.enabled and reward else None
        if learned is None:
            return replace(averages, assumptions=(f"{counted}, with the models as they are before training",))
        goes = "halfway from all of them to those with a reward, which training goes to"
        return replace(learned, assumptions=(f"{counted}: {goes}",))


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

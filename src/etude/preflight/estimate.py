"""The tokens and money that a run would take, measured on a few played episodes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.algorithms.collecting import Collecting
from etude.backends.openai_jobs import OpenAiAdapterConfig
from etude.config.finetuning import FinetuneConfig
from etude.config.schema import Config
from etude.core.call import Usage
from etude.core.errors import RequestError
from etude.core.stats import estimate
from etude.engines.bill import BillEntry, load_bill
from etude.engines.ledger import find_prices, how_to_price, require_bounded, unpriced_models
from etude.loop.training_data import TargetWatch
from etude.preflight.finding import Findings
from etude.runtime import open_runtime
from etude.store.episodes import iter_episodes
from etude.store.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Range:
    """A figure with its 95 % interval. The upper end is infinite if the spread is unknown."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class EpisodeUsage:
    """The usage of played episodes: their own calls, and calls about them, such as judges'."""

    episodes: int
    lines: tuple[BillEntry, ...]
    """The sums over these episodes by model."""
    error: float
    """Half of the 95 % interval of the episodes' mean tokens, divided by that mean; infinite if unknown."""

    def average_tokens(self, model: str | None) -> float:
        """Return the average tokens of an episode for one model."""
        own = [line for line in self.lines if line.model == model]
        return sum(line.prompt_tokens + line.completion_tokens for line in own) / self.episodes

    def usd(self, config: Config) -> dict[str, float]:
        """Return the cost of one episode by model, for models with a price."""
        prices, costs = find_prices(config), dict[str, float]()
        for line in self.lines:
            usage = Usage(line.prompt_tokens, line.completion_tokens, line.cached_tokens)
            if line.model in prices:
                costs[line.model] = prices[line.model].call_price(usage) / self.episodes
        return costs

    def interval(self, total: float) -> Range:
        """Return an estimated total with its interval."""
        return Range(total, total * max(0.0, 1 - self.error), total * (1 + self.error))


def measure_usage(run: RunFolder) -> EpisodeUsage | None:
    """Return the usage of a run's episodes, or None if they asked no model."""
    usages = [episode.usage for episode in iter_episodes(run.journal)]
    lines = load_bill(run.journal).by("model")
    if not usages or not lines:
        return None
    tokens = estimate([float(usage.prompt_tokens + usage.completion_tokens) for usage in usages])
    error = (tokens.high - tokens.mean) / tokens.mean if tokens.mean else math.inf
    return EpisodeUsage(len(usages), tuple(lines), error)


def check_spending(config: Config, findings: Findings) -> None:
    """Check that the budget's limits can be kept, and report the price of each model or its absence."""
    with findings.catch_errors("budget"):
        require_bounded(config)
        for name, price in find_prices(config).items():
            each = f"${price.prompt:g} for a million prompt tokens, ${price.completion:g} sampled"
            findings.ok(f"price of {name}", each)
        for name in unpriced_models(config):
            remedy = f"to give its price: {how_to_price(name)}"
            findings.warn(f"price of {name}", f"not known, and tokens alone are counted; {remedy}")


@dataclass(frozen=True, slots=True)
class Estimate:
    """The episodes of a run. If some were played, also its calls, tokens and price."""

    training_episodes: int
    """Each epoch counts with all examples that may replace its flat groups."""
    validation_episodes: int
    measured_on: int = 0
    """The number of episodes that the figures below were measured on. Without any, they are None."""
    calls: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens: Range | None = None
    """The tokens of all calls, including calls of judges and other models."""
    usd: Range | None = None
    """The price of these calls; None if no model has a price."""
    usd_by_model: Mapping[str, float] = field(default_factory=dict)
    training_usd: float | None = None
    """The highest price of hosted training; None if there is none or it is unknown."""
    warnings: tuple[str, ...] = ()


def estimate_run(
    config: Config, examples: int, held_out: int, played: EpisodeUsage | None = None
) -> Estimate:
    """Estimate a run on `examples` training and `held_out` validation examples.

    `played` is the measured usage of played episodes, if there are any.
    """
    training, validation = episode_counts(config, examples, held_out)
    if played is None:
        return Estimate(training, validation)
    episodes, costs = training + validation, played.usd(config)
    calls, prompt, completion = (
        episodes * sum(getattr(line, name) for line in played.lines) / played.episodes
        for name in ("calls", "prompt_tokens", "completion_tokens")
    )
    tokens = played.interval(prompt + completion)
    money = played.interval(episodes * math.fsum(costs.values())) if costs else None
    needed = {"usd": money and money.mean, "tokens": tokens.mean}
    warnings = (
        f"budget.{unit} is {most:,g}, and the whole run would take about {need:,.4g}: it would stop before "
        "its end, and could continue with more"
        for unit, need in needed.items()
        if (most := getattr(config.budget, unit, None)) is not None and need is not None and need > most
    )
    return Estimate(
        training_episodes=training,
        validation_episodes=validation,
        measured_on=played.episodes,
        calls=round(calls),
        prompt_tokens=round(prompt),
        completion_tokens=round(completion),
        tokens=tokens,
        usd=money,
        usd_by_model={name: usd * episodes for name, usd in costs.items()},
        training_usd=_training_cost(config, training, played),
        warnings=tuple(warnings),
    )


def target_blocks(finetuning: FinetuneConfig) -> dict[str | None, FinetuneConfig]:
    """Return the `finetuning` block of each target. Without targets, the whole block is under None."""
    by_target = {name: finetuning.for_target(name) for name in finetuning.targets}
    return dict(by_target.items()) or {None: finetuning}


def episode_counts(config: Config, examples: int, held_out: int) -> tuple[int, int]:
    """Return the episodes of training and of validation over all epochs, if none stops early.

    Each epoch counts with all examples that may replace its flat groups.
    """
    finetuning = config.finetuning
    if not finetuning.enabled:  # `etude evaluate` plays each example once.
        return 0, held_out or examples
    # Several targets share the episodes of an epoch.
    block = next(iter(target_blocks(finetuning).values()))
    builder: Any = config.trajectory_builders.get(block.trajectory_builder or "")
    first = getattr(builder, "examples_per_epoch", None) or examples
    each = min(first + getattr(builder, "replace_flat_groups", 0), examples)
    training = finetuning.num_epochs * each * getattr(builder, "num_generations", 1)
    interval = finetuning.run_configuration.validation_interval
    # Validations come before training, after a warm-up, and after epochs.
    start = 2 if block.warm_up else 1
    validations = start + finetuning.num_epochs // interval + (finetuning.num_epochs % interval != 0)
    return training, validations * held_out


def _training_cost(config: Config, episodes: int, each: EpisodeUsage) -> float | None:
    """Return the USD for a run's jobs at OpenAI. None if nothing is trained there, or a price is unknown.

    All tokens of the model in the episodes count as trained on, so this is an upper bound.
    """
    total, is_hosted = 0.0, False
    for block in target_blocks(config.finetuning).values():
        adapter = config.trainer_adapters.get(block.trainer_adapter or "")
        if not block.enabled or not isinstance(adapter, OpenAiAdapterConfig):
            continue
        llm = config.llms.get(block.target_model or "")
        if llm is None or llm.prices is None or (price := llm.prices.training) is None:
            return None
        is_hosted = True
        total += episodes * each.average_tokens(block.target_model) * adapter.epochs * price / 1e6
    return total if is_hosted else None


async def play_some(config: Config, episodes: int, findings: Findings) -> EpisodeUsage:
    """Play and score episodes of training in a temporary folder, and return their average usage.

    Raises the errors of a run, and RequestError if no model or no target function was called.
    """
    config = config.model_copy(update={"storage": None})
    with (
        tempfile.TemporaryDirectory(prefix="etude-check-") as folder,
        RunFolder.create(Path(folder), "played") as run,
    ):
        async with open_runtime(config, run) as runtime:
            examples = runtime.examples[:episodes]
            generations = -(-episodes // max(len(examples), 1))
            await runtime.evaluation.run(examples, phase="train/1", generations=generations)
        for name, block in target_blocks(config.finetuning).items():
            if block.enabled:
                _check_targets(config, name, block, run, findings)
        averages = measure_usage(run)
        if averages is None:
            raise RequestError(
                "no model was asked in the episodes that were played: there is nothing to measure"
            )
        return averages


def _check_targets(
    config: Config, target: str | None, block: FinetuneConfig, run: RunFolder, findings: Findings
) -> None:
    """Raise RequestError if no call in a run's episodes is one that the target is trained on."""
    warnings: list[str] = []
    watch = TargetWatch(block.target_functions, str(block.target_model), warnings.append, target)
    for episode in iter_episodes(run.journal):
        watch.saw(episode)
    # A custom builder may train on other calls.
    builder = config.trajectory_builders[str(block.trajectory_builder)]
    watch.epoch_over(is_empty=isinstance(builder, Collecting))
    for warning in warnings:
        findings.warn("target functions", warning)

"""The tokens and money that a run would take, measured on a few played episodes."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etude.algorithms.collecting import Collecting
from etude.config.finetuning import FinetuneConfig
from etude.config.schema import Config
from etude.core.episode import Example, count_episodes
from etude.core.errors import RequestError
from etude.core.stats import Estimate, estimate
from etude.engines.ledger import (
    BillEntry,
    find_prices,
    how_to_price,
    load_bill,
    require_bounded,
    unpriced_models,
)
from etude.loop.collections import TargetWatch
from etude.preflight.finding import Findings
from etude.runtime import open_runtime
from etude.store.episodes import iter_episodes
from etude.store.run_folder import temporary_run


@dataclass(frozen=True, slots=True)
class PlayedEpisodes:
    """The usage of played episodes: their own calls, and calls about them, such as judges'."""

    count: int
    usage: BillEntry
    """The sum over all models."""
    error: float
    """Half of the 95 % interval of the episodes' mean tokens, divided by that mean; infinite if unknown."""


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """The episodes of a run. If some were played, also its calls, tokens and price."""

    training_episodes: int
    """Each epoch counts with all examples that may replace its flat groups."""
    validation_episodes: int
    measured_on: int = 0
    """The number of episodes that the figures below were measured on. Without any, they are None."""
    calls: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens: Estimate | None = None
    """The tokens of all calls, including calls of judges and other models. The upper end of its interval is
    infinite if the spread is unknown."""
    usd: Estimate | None = None
    """The price of these calls; None if no model has a price."""
    warnings: tuple[str, ...] = ()


def estimate_run(
    config: Config, examples: Sequence[Example], held_out: int, played: PlayedEpisodes | None = None
) -> RunEstimate:
    """Estimate a run on training `examples` and `held_out` validation examples, from played episodes."""
    training, validation = episode_counts(config, examples, held_out)
    if played is None:
        return RunEstimate(training, validation)
    times, usage, error = (training + validation) / played.count, played.usage, played.error

    def total(amount: float) -> Estimate:
        mean = times * amount
        return Estimate(mean, mean * max(0.0, 1 - error), mean * (1 + error), played.count)

    figures = {"usd": total(usage.usd) if find_prices(config.llms) else None, "tokens": total(usage.tokens)}
    warnings = (
        f"budget.{unit} is {most:,g}, and the whole run would take about {needed.mean:,.4g}: it would stop "
        "before its end, and could continue with more"
        for unit, needed in figures.items()
        if (most := getattr(config.budget, unit, None)) is not None and needed and needed.mean > most
    )
    return RunEstimate(
        training_episodes=training,
        validation_episodes=validation,
        measured_on=played.count,
        calls=round(times * usage.calls),
        prompt_tokens=round(times * usage.prompt_tokens),
        completion_tokens=round(times * usage.completion_tokens),
        **figures,
        warnings=tuple(warnings),
    )


def check_spending(config: Config, findings: Findings) -> None:
    """Check that the budget's limits can be kept, and report the price of each model or its absence."""
    with findings.catch_errors("budget"):
        require_bounded(config.llms, config.budget)
        for name, price in find_prices(config.llms).items():
            price_text = f"${price.prompt:g} for a million prompt tokens, ${price.completion:g} sampled"
            findings.ok(f"price of {name}", price_text)
        for name in unpriced_models(config.llms):
            remedy = f"to give its price: {how_to_price(name)}"
            findings.warn(f"price of {name}", f"not known, and tokens alone are counted; {remedy}")


def target_blocks(finetuning: FinetuneConfig) -> dict[str | None, FinetuneConfig]:
    """Return the `finetuning` block of each target. Without targets, the whole block is under None."""
    by_target = {name: finetuning.for_target(name) for name in finetuning.targets}
    return dict(by_target.items()) or {None: finetuning}


def episode_counts(config: Config, examples: Sequence[Example], held_out: int) -> tuple[int, int]:
    """Return the episodes of training and of validation over all epochs, if none stops early.

    Each epoch counts with all examples that may replace its flat groups.
    """
    finetuning = config.finetuning
    if not finetuning.enabled:  # `etude evaluate` plays each example once.
        return 0, held_out or len(examples)
    # Several targets share the episodes of an epoch.
    block = next(iter(target_blocks(finetuning).values()))
    builder: Any = config.trajectory_builders.get(block.trajectory_builder or "")
    first = getattr(builder, "examples_per_epoch", None) or len(examples)
    each = min(first + getattr(builder, "replace_flat_groups", 0), len(examples))
    everything = count_episodes(examples, getattr(builder, "num_generations", 1))
    training = round(finetuning.num_epochs * each * everything / max(len(examples), 1))
    # Validations come before training, after a warm-up, every so many epochs, and at the end.
    interval = finetuning.run_configuration.validation_interval
    validations = (2 if block.warm_up else 1) + math.ceil(finetuning.num_epochs / interval)
    return training, validations * held_out


async def play_some(config: Config, episodes: int, findings: Findings) -> PlayedEpisodes:
    """Play and score episodes of training in a temporary folder, and return their usage. Raises the errors of
    a run, and RequestError if no model was called."""
    config = config.model_copy(update={"storage": None})
    with temporary_run("played") as run:
        async with open_runtime(config, run) as runtime:
            examples = runtime.examples[:episodes]
            generations = -(-episodes // max(len(examples), 1))
            await runtime.evaluation.run(examples, phase="train/1", generations=generations)
        for name, block in target_blocks(config.finetuning).items():
            if not block.enabled:
                continue
            warn = functools.partial(findings.warn, "target functions")
            watch = TargetWatch(block.target_functions, str(block.target_model), warn, name)
            for episode in iter_episodes(run.journal):
                watch.saw(episode)
            # A custom builder may train on other calls.
            builder = config.trajectory_builders[str(block.trajectory_builder)]
            watch.epoch_over(is_empty=isinstance(builder, Collecting))
        usages, bill = [episode.usage for episode in iter_episodes(run.journal)], load_bill(run.journal)
    if not usages or not bill.lines:
        raise RequestError("no model was called in the played episodes: there is nothing to measure")
    tokens = estimate([float(usage.prompt_tokens + usage.completion_tokens) for usage in usages])
    error = (tokens.high - tokens.mean) / tokens.mean if tokens.mean else math.inf
    return PlayedEpisodes(len(usages), bill.total, error)

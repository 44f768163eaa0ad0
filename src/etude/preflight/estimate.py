"""An estimate of what a run would take, with its assumptions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from etude.backends.openai_adapter import AUTO_EPOCHS, OpenAiAdapterConfig
from etude.budget.bill import Line
from etude.config.finetuning import FinetuneConfig
from etude.config.schema import Config
from etude.core.errors import EtudeError
from etude.preflight.spending import PerEpisode, Range, measured, over_budget
from etude.store.facts import list_runs
from etude.store.run_folder import RunFolder
from etude.store.stored_config import CONFIG, stored_data

_DEFAULT_PROMPT, _DEFAULT_COMPLETION = 200.0, 128.0
_MODEL_KEYS = ("model", "model_name", "max_tokens")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A rough estimate of a run, and how it was made."""

    training_episodes: int
    validation_episodes: int
    calls: int
    prompt_tokens: int
    completion_tokens: int
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    training_usd: float | None = None
    """Price of hosted training, at most; None when there is none, or it is not known."""
    tokens: Range | None = None
    """Those of all calls, judges' and others' included."""
    usd: Range | None = None
    """The money for these calls; None where no model has a price."""
    usd_by_model: Mapping[str, float] = field(default_factory=dict)
    measured_on: int = 0
    """The episodes that tokens and money were measured on; 0 where they are assumed."""


def estimate_run(
    config: Config,
    examples: int,
    held_out: int,
    example_tokens: float,
    played: PerEpisode | None = None,
) -> Estimate:
    """Of the training that a config describes, on so many examples with a text of `example_tokens` each.

    `played` is what episodes took that were played to measure it; else those of an earlier run count.
    """
    training, validation = episode_counts(config, examples, held_out)
    episodes = training + validation
    each = played or _earlier_run(config) or _assumed(config, example_tokens)
    usd, priced = _training_cost(config, training, each)
    tokens, costs = each.of(each.tokens, episodes), each.usd(config)
    money = each.of(math.fsum(costs.values()), episodes) if costs else None
    return Estimate(
        training_episodes=training,
        validation_episodes=validation,
        calls=round(episodes * each.calls),
        prompt_tokens=round(episodes * each.prompt_tokens),
        completion_tokens=round(episodes * each.completion_tokens),
        assumptions=(*each.assumptions, *priced),
        warnings=tuple(over_budget(config, money, tokens)),
        training_usd=usd,
        tokens=tokens,
        usd=money,
        usd_by_model={name: usd * episodes for name, usd in costs.items()},
        measured_on=0 if each.is_assumed else each.episodes,
    )


def blocks_of(finetuning: FinetuneConfig) -> dict[str | None, FinetuneConfig]:
    """The `finetuning` block of each target; the block itself, by None, where it trains one model."""
    by_target = {name: finetuning.for_target(name) for name in finetuning.targets}
    return dict(by_target.items()) or {None: finetuning}


def episode_counts(config: Config, examples: int, held_out: int) -> tuple[int, int]:
    """Episodes for training and for validation, over all epochs, when none stops early."""
    finetuning = config.finetuning
    # Several targets share the episodes of an epoch.
    builder: Any = config.trajectory_builders.get(_first_block(config).trajectory_builder or "")
    each = getattr(builder, "examples_per_epoch", None) or examples
    training = finetuning.num_epochs * min(each, examples) * getattr(builder, "num_generations", 1)
    interval = finetuning.run_configuration.validation_interval
    # Before training, of the base model and after a warm-up, and after epochs.
    start = 2 if _first_block(config).warm_ups else 1
    validations = start + finetuning.num_epochs // interval + (finetuning.num_epochs % interval != 0)
    return training, validations * held_out


def _first_block(config: Config) -> FinetuneConfig:
    return next(iter(blocks_of(config.finetuning).values()))


def _assumed(config: Config, example_tokens: float) -> PerEpisode:
    target = _first_block(config).target_model or next(iter(config.llms), "")
    limit = getattr(config.llms.get(target), "max_tokens", None)
    completion, half = (limit / 2, "half of max_tokens") if limit else (_DEFAULT_COMPLETION, "assumed")
    prompt, source = _DEFAULT_PROMPT, "assumed"
    if example_tokens:
        prompt, source = example_tokens, "its example"
    assumption = (
        f"1 call per episode with {prompt:.0f} prompt tokens ({source}) and {completion:.0f} sampled tokens "
        f"({half}); an agent with several turns takes a multiple, and judges are not counted. `--play 8` "
        "measures it on a few episodes; after a first run its own numbers are used"
    )
    line = Line(
        target, "agent", "", calls=1, prompt_tokens=round(prompt), completion_tokens=round(completion)
    )
    return PerEpisode(is_assumed=True, lines=(line,), assumptions=(assumption,))


def _training_cost(config: Config, episodes: int, each: PerEpisode) -> tuple[float | None, tuple[str, ...]]:
    """USD for the jobs of a run at OpenAI, and how that was come by.

    None when nothing is trained there, or a price is not known. All of the model's tokens in the episodes are
    taken to be trained on, so it is the most that it should be.
    """
    total, assumptions = 0.0, []
    for block in blocks_of(config.finetuning).values():
        adapter = config.trainer_adapters.get(block.trainer_adapter or "")
        if not block.enabled or not isinstance(adapter, OpenAiAdapterConfig):
            continue
        tokens = episodes * each.tokens_of(block.target_model)
        passes = AUTO_EPOCHS if adapter.n_epochs == "auto" else adapter.n_epochs
        llm = config.llms.get(block.target_model or "")
        model = str(getattr(llm, "model_name", ""))
        prices = None if llm is None or adapter.reinforcement is not None else llm.prices
        if prices is None or (price := prices.training) is None:
            how = f"give llms.{block.target_model}.prices.training, in USD for a million tokens"
            return None, (f"what OpenAI charges for training {model} is not known here: {how}",)
        total += tokens * passes * price / 1e6
        assumptions.append(
            f"every episode is trained on {passes} times in {model}, at "
            f"${price:g} for a million tokens; sampling not counted"
        )
    return (total, tuple(assumptions)) if assumptions else (None, ())


def _earlier_run(config: Config) -> PerEpisode | None:
    """Averages of the latest run in the output folder with the same agent and model; None without one."""
    for run in list_runs(config.finetuning.output_dir):
        try:
            if (run / CONFIG).is_file() and _is_alike(stored_data(run), config):
                with RunFolder.read(run) as folder:
                    averages = measured(folder)
                    if averages is not None:
                        counted = f"calls and tokens per episode as in run {folder.name}"
                        return replace(averages, assumptions=(f"{counted} ({averages.calls:.1f} calls)",))
        except EtudeError:
            continue  # A run that cannot be read is no help; `etude runs list` says why.
    return None


def _is_alike(data: dict[str, Any], config: Config) -> bool:
    """Whether a stored config has the same agent, and the same models under the same names."""
    agent, models = config.workflow, data.get("llms") or {}
    if agent is None or set(models) != set(config.llms):
        return False
    for name, llm in config.llms.items():
        now = llm.model_dump(mode="json", fallback=str)
        if any(models[name].get(key) != now.get(key) for key in _MODEL_KEYS):
            return False
    now = {"_type": agent.type_name, **agent.model_dump(mode="json", fallback=str)}
    return bool(data.get("workflow") == now)

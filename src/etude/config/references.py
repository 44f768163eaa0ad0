"""Names that stand for other parts of the config, and what may be left out when there is only one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from etude.config.component import ComponentConfig
from etude.config.document import KeyPath, dotted
from etude.config.finetuning import FinetuneConfig, RewardFunctionConfig
from etude.config.nearest import alternatives
from etude.config.problems import Problems
from etude.config.registry import NOUNS, Kind
from etude.config.schema import Config
from etude.config.sections import NAMED


@dataclass(frozen=True, slots=True)
class Refers:
    """Marks a field of a component config that names entries of another section.

    The field may be one name, a list of names, or a mapping whose keys are names.
    """

    kind: Kind


LlmRef: TypeAlias = Annotated[str, Refers("llms")]
"""The name of an entry of `llms`."""

EvaluatorRef: TypeAlias = Annotated[str, Refers("evaluators")]
"""The name of an entry of `eval.evaluators`."""


def check_component(path: KeyPath, component: ComponentConfig, config: Config, problems: Problems) -> None:
    """Check the names in a component's marked fields."""
    for field, info in type(component).model_fields.items():
        for marker in info.metadata:
            if isinstance(marker, Refers):
                for name in _names(getattr(component, field)):
                    _check((*path, field), marker.kind, name, config, problems)


def complete_finetuning(config: Config, problems: Problems) -> None:
    """Fill in the names that only have one candidate, and check the others."""
    finetuning = config.finetuning
    if finetuning.enabled:
        _require_parts(config, problems)
    finetuning.trainer = _choose("trainer", finetuning.trainer, "trainers", config, problems)
    finetuning.trajectory_builder = _choose(
        "trajectory_builder", finetuning.trajectory_builder, "trajectory_builders", config, problems
    )
    finetuning.trainer_adapter = _choose(
        "trainer_adapter", finetuning.trainer_adapter, "trainer_adapters", config, problems
    )
    finetuning.target_model = _choose("target_model", finetuning.target_model, "llms", config, problems)
    _choose_reward(finetuning, config, problems)


def _choose_reward(finetuning: FinetuneConfig, config: Config, problems: Problems) -> None:
    given = finetuning.reward_function.name if finetuning.reward_function else None
    name = _choose("reward_function", given, "evaluators", config, problems)
    finetuning.reward_function = RewardFunctionConfig(name=name) if name else None


def _choose(key: str, given: str | None, kind: Kind, config: Config, problems: Problems) -> str | None:
    path: KeyPath = ("finetuning", key)
    entries = section(config, kind)
    if given is not None:
        _check(path, kind, given, config, problems)
        return given
    candidates = list(entries)
    if kind == "llms" and len(entries) > 1:
        candidates = [name for name, entry in entries.items() if entry.type_name == "local"]
    if len(candidates) == 1:
        return candidates[0]
    if config.finetuning.enabled and entries and not problems.within(NAMED[kind]):
        several = f"'{dotted(NAMED[kind])}' has several; name one of: {', '.join(entries)}"
        problems.add(path, f"key '{dotted(path)}' is missing: {several}")
    return None


def section(config: Config, kind: Kind) -> Mapping[str, ComponentConfig]:
    """The components of a kind that a config names. Raises KeyError for a kind that has no names."""
    part: Any = config
    for key in NAMED[kind]:
        part = getattr(part, str(key))
    entries: Mapping[str, ComponentConfig] = part
    return entries


def _check(path: KeyPath, kind: Kind, name: str, config: Config, problems: Problems) -> None:
    entries = section(config, kind)
    if name not in entries:
        where = f"'{dotted(NAMED[kind])}' has no {NOUNS[kind]} '{name}'"
        problems.add(path, f"{dotted(path)}: {where}" + alternatives(name, entries, otherwise="it is empty"))


def _names(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _require_parts(config: Config, problems: Problems) -> None:
    for path, present, remedy in (
        (("llms",), config.llms, "a model to train, such as `llms: {policy: {_type: local, …}}`"),
        (("workflow",), config.workflow, "your agent, such as `workflow: my_agent:play`"),
        (
            ("eval", "general", "dataset"),
            config.eval.general.dataset or config.finetuning.run_configuration.dataset,
            "the examples, such as `eval: {general: {dataset: train.jsonl}}`",
        ),
        (
            ("eval", "evaluators"),
            config.eval.evaluators,
            "what scores an episode, such as `eval: {evaluators: {correct: my_agent:correct}}`",
        ),
    ):
        if not present:
            problems.add(path, f"key '{dotted(path)}' is missing, and finetuning is enabled; add {remedy}")

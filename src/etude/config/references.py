"""Names that stand for other parts of the config, and what may be left out when there is only one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel

from etude.config.component import ComponentConfig
from etude.config.document import KeyPath, dotted
from etude.config.finetuning import RewardFunctionConfig
from etude.config.names import check_name, choose
from etude.config.problems import Problems
from etude.config.registry import Kind
from etude.config.schema import Config
from etude.config.sections import SECTION_OF
from etude.config.slots import Slot
from etude.config.targets import complete_targets


@dataclass(frozen=True, slots=True)
class Refers:
    """Marks what in a component config names entries of another section: `Annotated[…, Refers("llms")]`.

    What is marked may be a name, a list of names, or a mapping whose keys are names.
    """

    kind: Kind


@dataclass(frozen=True, slots=True)
class RefersToAgent:
    """Marks what in a component config names agents of the workflow, in the same forms."""


LlmRef: TypeAlias = Annotated[str, Refers("llms")]
"""The name of an entry of `llms`."""

EvaluatorRef: TypeAlias = Annotated[str, Refers("evaluators")]
"""The name of an entry of `eval.evaluators`."""

AgentRef: TypeAlias = Annotated[str, RefersToAgent()]
"""The name of an agent of the workflow, such as one of a protocol."""

MarkT = TypeVar("MarkT", Refers, RefersToAgent)


def check_component(path: KeyPath, component: ComponentConfig, config: Config, problems: Problems) -> None:
    """Check the names that a component holds, however deep."""
    for key, _, mark, name in marked(Slot(type(component)), component, path, Refers):
        check_name(key, mark.kind, name, config, problems)


def complete_finetuning(config: Config, problems: Problems) -> None:
    """Fill in the names that only have one candidate, and check the others."""
    finetuning = config.finetuning
    if finetuning.enabled:
        _require_parts(config, problems)
    _choose_component("trainer", config, problems)
    if finetuning.targets:
        complete_targets(config, problems)
        return
    if config.workflow is not None and "target_functions" not in finetuning.model_fields_set:
        finetuning.target_functions = list(config.workflow.target_functions)
    _choose_component("trajectory_builder", config, problems)
    _choose_component("trainer_adapter", config, problems)
    finetuning.target_model = choose(
        ("finetuning", "target_model"), finetuning.target_model, "llms", config, problems
    )
    given = finetuning.reward_function.name if finetuning.reward_function else None
    name = choose(("finetuning", "reward_function"), given, "evaluators", config, problems)
    finetuning.reward_function = RewardFunctionConfig(name=name) if name else None


def _choose_component(key: str, config: Config, problems: Problems) -> None:
    """Fill in the entry that `finetuning.<key>` means: the one that is named, or the only one."""
    finetuning, kind = config.finetuning, SECTION_OF[key]
    setattr(finetuning, key, choose(("finetuning", key), finetuning.named(key), kind, config, problems))


def marked(
    slot: Slot, value: Any, path: KeyPath, mark: type[MarkT]
) -> Iterator[tuple[KeyPath, KeyPath, MarkT, str]]:
    """Each name within `value` that a marker in its type says is a reference.

    With the place of the key, and where under it the name is one of several.
    """
    for marker in (item for arm in slot.arms() for item in arm.metadata if isinstance(item, mark)):
        yield from ((path, below, marker, name) for below, name in _names(value))
    if isinstance(value, BaseModel):
        for field, info in type(value).model_fields.items():
            inside = Slot(info.annotation, tuple(info.metadata))
            yield from marked(inside, getattr(value, field), (*path, field), mark)
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            for inner in slot.below(key):
                yield from marked(inner, item, (*path, key), mark)


def _names(value: Any) -> Iterator[tuple[KeyPath, str]]:
    """A name, a list of names, or the keys of a mapping; other values that the type allows have none."""
    if isinstance(value, str):
        yield (), value
    elif isinstance(value, dict):
        yield from (((key,), key) for key in value)
    elif isinstance(value, list | tuple):
        yield from (((index,), name) for index, name in enumerate(value) if isinstance(name, str))


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

"""Names that refer to other parts of the config: checks that they exist, and fills in missing ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from etude.config.component import ComponentConfig
from etude.config.document import KeyPath, join_path
from etude.config.finetuning import FinetuneConfig, RewardFunctionConfig, TargetConfig
from etude.config.key_types import KeyType, Problems, walk
from etude.config.registry import KINDS, Kind, section
from etude.config.schema import Config
from etude.core.errors import EtudeError, alternatives

SECTION_OF: dict[str, Kind] = {
    "trainer": "trainers",
    "trajectory_builder": "trajectory_builders",
    "trainer_adapter": "trainer_adapters",
}
"""The section that each of these keys of `finetuning` refers to."""

EVERY = "*"
_TARGET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class ReferenceTo:
    """Marks a key of a component config that names entries of a section, or agents of the workflow.

    `Annotated[…, ReferenceTo("llms")]` may be a name, a list of names, or a mapping whose keys are names.
    """

    kind: Kind
    """A kind of component, or `agents`."""


LlmRef: TypeAlias = Annotated[str, ReferenceTo("llms")]
"""The name of an entry of `llms`."""

AgentRef: TypeAlias = Annotated[str, ReferenceTo("agents")]
"""The name of an agent of the workflow, such as an agent of a protocol."""

Agents: TypeAlias = Mapping[str, str | None]
"""The agents of a workflow, each with the entry of `llms` that it samples from."""


def _references(component: ComponentConfig, path: KeyPath) -> Iterator[tuple[KeyPath, ReferenceTo, str]]:
    """Yield each name within a component that its type marks as a reference, with its place."""
    for inside, slot, value in walk(component, KeyType(type(component)), path):
        for mark in (item for arm in slot.arms() for item in arm.metadata if isinstance(item, ReferenceTo)):
            if isinstance(value, str):
                yield inside, mark, value
            elif isinstance(value, dict):
                yield from (((*inside, name), mark, name) for name in value)
            elif isinstance(value, list | tuple):
                names = ((index, name) for index, name in enumerate(value) if isinstance(name, str))
                yield from (((*inside, index), mark, name) for index, name in names)


def complete_names(
    config: Config, components: Mapping[KeyPath, ComponentConfig], problems: Problems, in_training: Problems
) -> None:
    """Check the names in the config and its components, and fill in names that have only one candidate.

    Problems that matter only in training go into `in_training`, since a config may also be evaluated.
    """
    names, block = _Names(config, problems), config.finetuning
    references = [
        (path, *reference) for path, entry in components.items() for reference in _references(entry, path)
    ]
    for _, path, mark, name in references:
        if mark.kind != "agents":
            names.check(path, mark.kind, name)
    names.complete_finetuning()
    try:
        agents = config.workflow.agents() if config.workflow is not None else None
    except EtudeError:
        return  # The error about the workflow comes when it is built.
    if agents is None:
        return
    builders = {block.trajectory_builder, *(each.trajectory_builder for each in block.targets.values())}
    for component, path, mark, name in references:
        is_builder = component[0] == "trajectory_builders"
        if mark.kind == "agents" and (not is_builder or component[1] in builders):
            _check_agent(path, name, agents, in_training if is_builder else problems)
    _check_trained(block, agents, in_training)


class _Names:
    def __init__(self, config: Config, problems: Problems) -> None:
        self._config, self._finetuning, self._problems = config, config.finetuning, problems

    def check(self, path: KeyPath, kind: Kind, name: str) -> None:
        """Add a problem if the name at `path` has no component of the kind."""
        entries = section(self._config, kind)
        if name not in entries:
            listing = alternatives(name, entries, otherwise="it is empty")
            about = KINDS[kind]
            text = f"'{join_path(about.places[0])}' has no {about.noun} '{name}'{listing}"
            self._problems.add(path, text)

    def choose(self, path: KeyPath, given: str | None, kind: Kind) -> str | None:
        """Return the name for `path`: the given one, or the only candidate. Several are a problem in
        training."""
        entries = section(self._config, kind)
        if given is not None:
            self.check(path, kind, given)
            return given
        candidates = [name for name, entry in entries.items() if entry.type_name != "opponents"]
        if kind == "llms" and len(candidates) > 1:
            candidates = [name for name in candidates if entries[name].type_name == "local"]
        if len(candidates) == 1:
            return candidates[0]
        place = KINDS[kind].places[0]
        if self._finetuning.enabled and entries:
            several = f"'{join_path(place)}' has several; name one of: {', '.join(entries)}"
            self._problems.add_missing(path, f": {several}")
        return None

    def complete_finetuning(self) -> None:
        """Fill in the keys that the `finetuning` block leaves out, and check its names."""
        block, workflow = self._finetuning, self._config.workflow
        if block.enabled:
            self._require_parts()
        block.trainer = self.choose(("finetuning", "trainer"), block.named("trainer"), "trainers")
        if block.targets:
            self._complete_targets()
            return
        if workflow is not None and "target_functions" not in block.model_fields_set:
            block.target_functions = list(workflow.target_functions)
        self._complete(("finetuning",), block)
        block.target_model = self.choose(("finetuning", "target_model"), block.target_model, "llms")

    def _complete(self, path: KeyPath, trained: FinetuneConfig | TargetConfig) -> None:
        """Fill in the parts of a target, from the whole block where it has none, or of the block itself."""
        block = self._finetuning
        for key in ("trajectory_builder", "trainer_adapter"):
            own = getattr(trained, key) if trained is not block else None
            setattr(trained, key, self.choose((*path, key), own or block.named(key), SECTION_OF[key]))
        reward = trained.reward_function or block.reward_function
        name = self.choose((*path, "reward_function"), reward.name if reward else None, "evaluators")
        trained.reward_function = RewardFunctionConfig(name=name) if name else None

    def _require_parts(self) -> None:
        general, settings = self._config.eval.general, self._finetuning.run_configuration
        parts: tuple[tuple[KeyPath, object, str], ...] = (
            (("llms",), self._config.llms, "a model to train, such as `llms: {policy: {_type: local, …}}`"),
            (("workflow",), self._config.workflow, "your agent, such as `workflow: my_agent:play`"),
            (
                ("eval", "general", "dataset"),
                general.dataset or settings.dataset,
                "the examples, such as `eval: {general: {dataset: train.jsonl}}`",
            ),
            (
                ("eval", "evaluators"),
                self._config.eval.evaluators,
                "what scores an episode, such as `eval: {evaluators: {correct: my_agent:correct}}`",
            ),
        )
        for path, part, remedy in parts:
            if not part:
                self._problems.add_missing(path, f", and finetuning is enabled; add {remedy}")

    def _complete_targets(self) -> None:
        block, add = self._finetuning, self._problems.add
        if block.target_model is not None:
            remedy = "the models to train are those of 'finetuning.targets'; remove this key"
            add(("finetuning", "target_model"), remedy)
        if "target_functions" not in block.model_fields_set:
            # The target's model already selects the calls, for any function.
            block.target_functions = [EVERY]
        trained_by: dict[str, str] = {}
        for name, target in block.targets.items():
            path: KeyPath = ("finetuning", "targets", name)
            if not _TARGET_NAME.fullmatch(name):
                add(path, "a target's name is made of letters, digits, '-', '_' and '.'")
            if target.model is not None:
                self.check((*path, "model"), "llms", target.model)
            elif name not in self._config.llms:
                self._problems.add_missing((*path, "model"), f": 'llms' has no model '{name}'")
            model = target.model = target.model or name
            self._complete(path, target)
            target.target_functions = target.target_functions or list(block.target_functions)
            target.curriculum_learning = target.curriculum_learning or block.curriculum_learning
            if (first := trained_by.setdefault(model, name)) != name:
                text = f"the model '{model}' is trained by the target '{first}' already; "
                add((*path, "model"), f"{text}give each target an entry of 'llms'")
        if all(target.frozen for target in block.targets.values()):
            add(("finetuning", "targets"), "all of them are frozen; train one")


def _check_agent(path: KeyPath, name: str, agents: Agents, problems: Problems) -> None:
    if name not in agents:
        problems.add(path, f"the workflow has no agent '{name}'" + alternatives(name, agents))


def _check_trained(block: FinetuneConfig, agents: Agents, problems: Problems) -> None:
    """Add problems for functions that no agent has, and trained models that no agent samples from."""
    shared = block.target_functions if "target_functions" in block.model_fields_set else []
    named: dict[KeyPath, Sequence[str]] = {("finetuning",): shared}
    trained: dict[KeyPath, FinetuneConfig] = {("finetuning", "target_model"): block}
    if block.targets:
        trained = {("finetuning", "targets", name): block.for_target(name) for name in block.targets}
        named |= {
            path: own.target_functions for path, own in trained.items() if own.target_functions != shared
        }
    for path, functions in named.items():
        for number, name in enumerate(functions):
            if name != EVERY:
                _check_agent((*path, "target_functions", number), name, agents, problems)
    for path, own in trained.items():
        frozen = bool(block.targets) and block.targets[str(path[-1])].frozen
        models = {name: model for name, model in agents.items() if {EVERY, name} & {*own.target_functions}}
        is_sampled = any(model in (None, own.target_model) for model in models.values())
        if block.enabled and not frozen and own.target_model is not None and models and not is_sampled:
            uses = ", ".join(f"{agent}: {model}" for agent, model in models.items())
            text = f"no agent samples from '{own.target_model}', so that nothing would be trained ({uses}); "
            problems.add(path, f"{text}name it in 'workflow.policies', or train another model")

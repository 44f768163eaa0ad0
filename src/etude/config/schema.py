"""The whole config, validated, and the names in it of its other parts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, PrivateAttr, SerializeAsAny, field_validator, model_validator

from etude.config.component import (
    CHANGEABLE,
    ClusterConfig,
    ComponentConfig,
    DatasetConfig,
    EvaluatorConfig,
    LlmConfig,
    OutputFolder,
    ReferenceTo,
    RunBudget,
    Supplies,
    ToolsConfig,
    TrackerConfig,
    WorkflowConfig,
)
from etude.config.document import KeyPath, join_path
from etude.config.finetuning import (
    FinetuneConfig,
    RewardFunctionConfig,
    TargetConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
)
from etude.config.key_types import KeyType, Problems, walk
from etude.config.registry import KINDS, Kind
from etude.core.errors import ConfigError, EtudeError, alternatives

SECTION_OF: dict[str, Kind] = {
    "trainer": "trainers",
    "trajectory_builder": "trajectory_builders",
    "trainer_adapter": "trainer_adapters",
}
"""The section that each of these keys of `finetuning` refers to."""

EVERY = "*"
_TARGET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_PASSWORD = re.compile(r"//[^/@]*:[^/@]*@")


class StorageConfig(BaseModel, extra="forbid", frozen=True):
    """Where the journal and the weights of a run are backed up, and when."""

    address: Annotated[str, CHANGEABLE]
    """The folder for all runs, with one subfolder each: `s3://bucket/etude`, `gs://…`, `file:///mnt/…`, or
    another address that fsspec has a driver for."""
    options: Annotated[dict[str, Annotated[Any, CHANGEABLE]], CHANGEABLE] = Field(default_factory=dict)
    """Arguments of fsspec's driver. Give credentials in the environment, as the driver reads them, or as
    `${NAME}`."""
    interval: Annotated[float, CHANGEABLE] = Field(default=60.0, gt=0)
    """Seconds from one copy to the next, if there is new data."""

    @model_validator(mode="before")
    @classmethod
    def _accept_bare_address(cls, value: Any) -> Any:
        return {"address": value} if isinstance(value, str) else value

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if "://" not in address:
            example = (
                f"file://{address}" if address.startswith("/") else "file:///mnt/backup, s3://bucket/etude"
            )
            raise ValueError(f"an address begins with its scheme, as in {example}")
        if _PASSWORD.search(address):
            raise ValueError("no password in an address: give it as an option, `password: ${NAME}`")
        return address.rstrip("/")


class EvalGeneralConfig(BaseModel, extra="forbid", frozen=True):
    """How episodes are run, in training and in evaluation."""

    max_concurrency: Annotated[int, CHANGEABLE] = Field(default=8, ge=1)
    """Episodes that run at the same time."""
    output_dir: OutputFolder | None = None
    """A folder that also gets the results of `etude evaluate`: `evaluation.json` and `items.jsonl`."""
    dataset: SerializeAsAny[DatasetConfig] | None = None
    """The examples: a file, `module:function`, or a dataset component."""
    timeout: Annotated[float, CHANGEABLE] = Field(default=300.0, gt=0)
    """Seconds that an episode may take."""
    max_calls: Annotated[int, CHANGEABLE] = Field(default=1000, ge=1)
    """Model calls that an episode may make."""
    isolation: Annotated[Literal["none", "process"], CHANGEABLE] = "none"
    """Where episodes run and are scored. `none`: in the process of the run. `process`: in other processes;
    code that crashes, blocks or takes too much memory then ends only its process and its episode."""
    runners: Annotated[int | None, CHANGEABLE] = Field(default=None, ge=1)
    """Processes for `isolation: process`; by default one per core, and at most `max_concurrency`."""
    runner_memory: Annotated[float | None, CHANGEABLE] = Field(default=None, gt=0)
    """Gigabytes that each of these processes may allocate (on Linux). Code that asks for more gets a
    MemoryError. By default there is no limit."""

    @model_validator(mode="after")
    def _check_runners(self) -> Self:
        for name in ("runners", "runner_memory"):
            if self.isolation != "process" and getattr(self, name) is not None:
                raise ValueError(f"`{name}` is for processes that play episodes: set isolation: process too")
        return self


class EvalConfig(BaseModel, extra="forbid", frozen=True):
    """Examples, and the evaluators that score the episodes."""

    general: EvalGeneralConfig = Field(default_factory=EvalGeneralConfig)
    """How episodes are run, and on which examples."""
    evaluators: dict[str, SerializeAsAny[EvaluatorConfig]] = Field(default_factory=dict)
    """The evaluators that score an episode, by name."""


class StallConfig(BaseModel, extra="forbid", frozen=True):
    """When a run without progress ends."""

    say_after: ClassVar[float] = 120.0
    """Seconds without progress after which the run says what it waits for. It repeats this each time that
    the seconds have doubled."""
    end_after: Annotated[float | None, CHANGEABLE] = Field(default=3600.0, gt=0)
    """Seconds without progress after which the run ends, to be resumed; at least twice an episode's
    `timeout`. Null for never. Training jobs are limited by the trainer's `job_timeout` instead."""


class Config(BaseModel, extra="forbid", frozen=True):
    """A config file, with every component's own class in place and every default filled in."""

    llms: dict[str, SerializeAsAny[LlmConfig]] = Field(default_factory=dict)
    """The models that agents call, by name."""
    workflow: SerializeAsAny[WorkflowConfig] | None = None
    """The agent: `module:function`, or a workflow component."""
    tools: dict[str, SerializeAsAny[ToolsConfig]] = Field(default_factory=dict)
    """Tools that agents call, by the names of the sets: `episode.tools("search")`."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Examples and scores."""
    trajectory_builders: dict[str, SerializeAsAny[TrajectoryBuilderConfig]] = Field(default_factory=dict)
    """The builder that turns episodes into training data; by default `grpo`."""
    trainer_adapters: dict[str, SerializeAsAny[TrainerAdapterConfig]] = Field(default_factory=dict)
    """Where training happens; by default `local`, in this process."""
    trainers: dict[str, SerializeAsAny[TrainerConfig]] = Field(default_factory=dict)
    """The loop over epochs; by default `epochs`."""
    cluster: Annotated[SerializeAsAny[ClusterConfig] | None, CHANGEABLE] = None
    """The machines that play the episodes, and train; by default this process does."""
    finetuning: FinetuneConfig = Field(default_factory=FinetuneConfig)
    """The model to train, and for how long."""
    budget: Annotated[RunBudget | None, CHANGEABLE] = None
    """The most that the run may consume; by default there is no limit."""
    stall: Annotated[StallConfig, CHANGEABLE] = Field(default_factory=StallConfig)
    """When a run without progress ends, to be resumed: after `end_after` seconds (3600; null: never), and at
    least twice an episode's `timeout`. Training jobs have the trainer's `job_timeout` instead."""
    storage: Annotated[StorageConfig | None, CHANGEABLE] = None
    """Where the run is backed up while it runs, against the loss of its machine: an address or a block."""

    report: Annotated[list[SerializeAsAny[TrackerConfig]], CHANGEABLE] = Field(default_factory=list)
    """Trackers that show the run while it runs, one or several; by default it is only in its folder."""

    _as_written: dict[KeyPath, str] = PrivateAttr(default_factory=dict)
    """Text that `resolved_yaml` writes instead of a value: references to the environment, import paths."""

    _untrainable: ConfigError | None = PrivateAttr(default=None)

    _supplies: Supplies = PrivateAttr(default_factory=Supplies)
    """The rewards of the workflow's own evaluators; none if the config names evaluators."""

    def check_training(self) -> None:
        """Raise ConfigError for problems that matter only in training."""
        if self._untrainable is not None:
            raise self._untrainable

    def section(self, kind: Kind) -> Mapping[str, ComponentConfig]:
        """Return the components of a kind by name."""
        part: Any = self
        for key in KINDS[kind].places[0]:
            part = getattr(part, str(key))
        entries: Mapping[str, ComponentConfig] = part
        return entries

    def complete_names(self, problems: Problems, in_training: Problems) -> None:
        """Check the names of other parts in this config, and fill in names that have only one candidate.

        Problems that matter only in training go into `in_training`, since a config may also be evaluated.
        """
        block, references = self.finetuning, [*self._references()]
        for path, kind, name in references:
            if kind != "agents":
                self._check(path, kind, name, problems)
        self._complete_finetuning(problems)
        try:
            agents = self.workflow.agents() if self.workflow is not None else None
        except EtudeError:
            return  # The error about the workflow comes when it is built.
        if agents is None:
            return
        builders = {block.trajectory_builder, *(each.trajectory_builder for each in block.targets.values())}
        for path, kind, name in references:
            is_builder = path[0] == "trajectory_builders"
            if kind == "agents" and (not is_builder or path[1] in builders):
                _check_agent(path, name, agents, in_training if is_builder else problems)
        _check_trained(block, agents, in_training)

    def _references(self) -> Iterator[tuple[KeyPath, Kind, str]]:
        """Yield each name that its type marks as a reference, with its place and what it names."""
        for path, slot, value in walk(self, KeyType(Config)):
            marks = (item for arm in slot.arms() for item in arm.metadata if isinstance(item, ReferenceTo))
            for mark in marks:
                if isinstance(value, str):
                    yield path, mark.kind, value
                elif isinstance(value, dict):
                    yield from (((*path, name), mark.kind, name) for name in value)
                elif isinstance(value, list | tuple):
                    names = ((index, name) for index, name in enumerate(value) if isinstance(name, str))
                    yield from (((*path, index), mark.kind, name) for index, name in names)

    def _check(self, path: KeyPath, kind: Kind, name: str, problems: Problems) -> None:
        """Add a problem if the name at `path` has no component of the kind."""
        entries = self.section(kind)
        if name not in entries:
            listing = alternatives(name, entries, otherwise="it is empty")
            place, noun = join_path(KINDS[kind].places[0]), KINDS[kind].noun
            problems.add(path, f"'{place}' has no {noun} '{name}'{listing}")

    def _choose(self, path: KeyPath, given: str | None, kind: Kind, problems: Problems) -> str | None:
        """Return the name for `path`: the given one, or the only candidate. Several are a problem in
        training."""
        entries = self.section(kind)
        if given is not None:
            self._check(path, kind, given, problems)
            return given
        candidates = [name for name, entry in entries.items() if entry.type_name != "opponents"]
        if kind == "llms" and len(candidates) > 1:
            candidates = [name for name in candidates if entries[name].type_name == "local"]
        if len(candidates) == 1:
            return candidates[0]
        place = KINDS[kind].places[0]
        if self.finetuning.enabled and entries:
            several = f"'{join_path(place)}' has several; name one of: {', '.join(entries)}"
            problems.add_missing(path, f": {several}")
        return None

    def _complete_finetuning(self, problems: Problems) -> None:
        """Fill in the keys that the `finetuning` block leaves out, and check its names."""
        block, workflow = self.finetuning, self.workflow
        if block.enabled:
            self._require_parts(problems)
        path: KeyPath = ("finetuning", "trainer")
        block.trainer = self._choose(path, block.chosen_component("trainer"), "trainers", problems)
        if block.targets:
            self._complete_targets(problems)
            return
        if workflow is not None and "target_functions" not in block.model_fields_set:
            block.target_functions = list(workflow.target_functions)
        path = ("finetuning", "target_model")
        block.target_model = self._choose(path, block.target_model, "llms", problems)
        self._complete(("finetuning",), block, block.target_model, problems)

    def _complete(
        self, path: KeyPath, trained: FinetuneConfig | TargetConfig, model: str | None, problems: Problems
    ) -> None:
        """Fill in the parts of a target, from the whole block where it has none, or of the block itself."""
        block = self.finetuning
        for key in ("trajectory_builder", "trainer_adapter"):
            part = getattr(trained, key) if trained is not block else None
            name = self._choose((*path, key), part or block.chosen_component(key), SECTION_OF[key], problems)
            setattr(trained, key, name)
        reward = trained.reward_function or block.reward_function
        supplied = self._supplies.reward_of_model.get(str(model), self._supplies.reward)
        path = (*path, "reward_function")
        name = self._choose(path, reward.name if reward else supplied, "evaluators", problems)
        trained.reward_function = RewardFunctionConfig(name=name) if name else None

    def _require_parts(self, problems: Problems) -> None:
        general, settings = self.eval.general, self.finetuning.run_configuration
        parts: tuple[tuple[KeyPath, object, str], ...] = (
            (("llms",), self.llms, "a model to train, such as `llms: {policy: {_type: local, …}}`"),
            (("workflow",), self.workflow, "your agent, such as `workflow: my_agent:play`"),
            (
                ("eval", "general", "dataset"),
                general.dataset or settings.dataset,
                "the examples, such as `eval: {general: {dataset: train.jsonl}}`",
            ),
            (
                ("eval", "evaluators"),
                self.eval.evaluators,
                "what scores an episode, such as `eval: {evaluators: {correct: my_agent:correct}}`",
            ),
        )
        for path, part, remedy in parts:
            if not part:
                problems.add_missing(path, f", and finetuning is enabled; add {remedy}")

    def _complete_targets(self, problems: Problems) -> None:
        block, add = self.finetuning, problems.add
        if block.target_model is not None:
            remedy = "'finetuning.targets' names the models to train; remove this key"
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
                self._check((*path, "model"), "llms", target.model, problems)
            elif name not in self.llms:
                problems.add_missing((*path, "model"), f": 'llms' has no model '{name}'")
            model = target.model = target.model or name
            self._complete(path, target, model, problems)
            target.target_functions = target.target_functions or list(block.target_functions)
            target.curriculum_learning = target.curriculum_learning or block.curriculum_learning
            if (first := trained_by.setdefault(model, name)) != name:
                text = f"the model '{model}' is trained by the target '{first}' already; "
                add((*path, "model"), f"{text}give each target an entry of 'llms'")
            if target.offset >= block.num_epochs and block.enabled and not target.frozen:
                text = f"{target.offset} is beyond the last epoch, so it is never trained; take fewer,"
                add((*path, "offset"), f"{text} or raise 'finetuning.num_epochs' ({block.num_epochs})")
        if all(target.frozen for target in block.targets.values()):
            add(("finetuning", "targets"), "all of them are frozen; train one")


def _check_agent(path: KeyPath, name: str, agents: Mapping[str, str | None], problems: Problems) -> None:
    if name not in agents:
        problems.add(path, f"the workflow has no agent '{name}'" + alternatives(name, agents))


def _check_trained(block: FinetuneConfig, agents: Mapping[str, str | None], problems: Problems) -> None:
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
            text = f"no agent samples from '{own.target_model}', so nothing would be trained ({uses}); "
            problems.add(path, f"{text}name it in 'workflow.policies', or train another model")

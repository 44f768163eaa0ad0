"""The base classes of component configs, one for each kind of `_type`; prices and budgets of models.

A workflow may also supply parts of a config, so that an environment needs only one line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import AfterValidator, BaseModel, Field

from etude.core.call import Usage
from etude.core.data_model import DataModel
from etude.core.episode import ToolLimits, ToolSet, ToolSource
from etude.core.history import Action

CHANGEABLE = "changeable"
"""Marks a key that `etude resume -o` may set: `timeout: Annotated[float, CHANGEABLE] = Field(...)`. These are
limits, timeouts, concurrency and memory, never training settings."""


@dataclass(frozen=True, slots=True)
class ReferenceTo:
    """Marks a key of a component config that names entries of a section, or agents of the workflow.

    `Annotated[…, ReferenceTo("llms")]` may be a name, a list of names, or a mapping whose keys are names.
    """

    kind: str
    """A kind of component, or `agents`."""


LlmRef: TypeAlias = Annotated[str, ReferenceTo("llms")]
"""The name of an entry of `llms`."""

AgentRef: TypeAlias = Annotated[str, ReferenceTo("agents")]
"""The name of an agent of the workflow, such as an agent of a protocol."""

Usd: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Amount: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(gt=0)]


def _require_no_file(folder: Path) -> Path:
    existing = next((each for each in (folder, *folder.parents) if each.exists()), None)
    if existing is not None and not existing.is_dir():
        raise ValueError(f"{existing} is a file; name a folder")
    return folder


OutputFolder: TypeAlias = Annotated[Path, AfterValidator(_require_no_file)]
"""A folder to write into, which need not exist."""


class ModelPrices(BaseModel, extra="forbid", frozen=True):
    """Prices of a model, in USD per million tokens. If trained versions cost more, give their prices."""

    prompt: Usd
    """Price of prompt tokens."""
    completion: Usd
    """Price of sampled tokens, thinking included."""
    cached: Usd | None = None
    """Price of prompt tokens that the endpoint reports as cached; by default the price `prompt`."""
    training: Usd | None = None
    """Price of trained tokens, counted in each epoch of a job; if left out, it is unknown."""

    def call_price(self, usage: Usage) -> float:
        """Return the price of a call in USD."""
        fresh, of_cached = usage.prompt_tokens - usage.cached_tokens, self.cached
        cached = usage.cached_tokens * (self.prompt if of_cached is None else of_cached)
        return (fresh * self.prompt + cached + usage.completion_tokens * self.completion) / 1e6


class RunBudget(BaseModel, extra="forbid", frozen=True):
    """The most that a run may consume. At a limit it stops and keeps all; with a larger one it resumes."""

    usd: Amount | None = None
    """Limit in US dollars."""
    tokens: Count | None = None
    """Limit on prompt tokens, sampled tokens and the trained tokens that a backend reports, together."""

    hours: Amount | None = None
    """Limit on the hours that the run works, in all its processes together."""


Entries: TypeAlias = Mapping[str, Any]
"""A component as a config file has it: `{"_type": "seeds", "size": 64}`."""


@dataclass(frozen=True, slots=True)
class Supplies:
    """Parts of a config that follow from its workflow. Each is used only if the config names none."""

    dataset: Entries | None = None
    """Replaces a missing `eval.general.dataset`."""
    validation: Entries | None = None
    """Replaces a missing `finetuning.run_configuration.validation_dataset`."""
    evaluators: Mapping[str, Entries] = field(default_factory=dict)
    """Replaces missing `eval.evaluators`, all of them together."""
    reward: str | None = None
    """The evaluator that is the reward if the config names none; needed if there are several."""
    reward_of_model: Mapping[str, str] = field(default_factory=dict)
    """The rewards of models that have their own, by the models' names in `llms`."""


class ComponentConfig(DataModel):
    """The base of all component configs. `class MyConfig(TrainerConfig, name="mine")` makes `_type: mine`.

    Unknown keys are errors, and a key's docstring is its description. The harness sets the reward function by
    assignment.
    """

    type_name: ClassVar[str] = ""

    @classmethod
    def __pydantic_init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if name is not None:
            cls.type_name = name

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        """Take `name` out of the class arguments. pydantic's own hook above stores it."""
        super().__init_subclass__(**kwargs)


class LlmConfig(ComponentConfig):
    """A model that agents can call: an entry of `llms`."""

    prices: Annotated[ModelPrices | None, CHANGEABLE] = None
    """The prices of its tokens. If you leave them out, only tokens are counted."""


class WorkflowConfig(ComponentConfig):
    """The user's agent: the `workflow` block."""

    target_functions: ClassVar[tuple[str, ...]] = ("<workflow>",)
    """The default of `finetuning.target_functions`; `*` means all functions."""

    def agents(self) -> Mapping[str, str | None] | None:
        """Return the agents, each with the entry of `llms` that it samples from (None: the default model).

        A call of an agent is a call of the function with its name. Return None if the agents are unknown
        before the workflow runs; then names of agents in the config are not checked. Raises EtudeError if the
        workflow cannot be made.
        """
        return None

    def supplies(self) -> Supplies:
        """Return the dataset and the evaluators that follow from this block, for a config that names none.

        Raises EtudeError if they cannot be determined.
        """
        return Supplies()

    def missing(self) -> list[str]:
        """Return the missing programs, keys and packages that it cannot run without, for `etude check`.

        Each is a sentence that says what to type. Problems that appear when it is built need not be named.
        """
        return []


class ToolsConfig(ComponentConfig):
    """Tools that agents call: an entry of `tools`."""

    max_calls: Annotated[int, CHANGEABLE] = Field(default=100, ge=1)
    """Most calls of these tools in one episode. The model is told when it has used them up."""
    max_characters: int = Field(default=20_000, ge=1)
    """Most characters of one result. The rest is cut off, and the model is told."""
    call_timeout: Annotated[float, CHANGEABLE] = Field(default=30.0, gt=0)
    """Seconds that one call may take. An episode whose tool takes longer fails."""
    only: list[str] | None = Field(default=None, min_length=1)
    """The tools to offer; by default all."""
    prefix: str = Field(default="", pattern=r"^[A-Za-z0-9_-]*$")
    """Put before the name of each tool, to distinguish the tools of two sets."""

    def tool_set(self, name: str, source: ToolSource, path: str) -> ToolSet:
        """Return a source's tools with these limits; `path` is the place of these keys in the config."""
        limits = ToolLimits(self.max_calls, self.max_characters, self.call_timeout)
        only = None if self.only is None else tuple(self.only)
        return ToolSet(name, source, limits, only, self.prefix, path)


class ClusterConfig(ComponentConfig):
    """Machines that play the episodes, and train: the `cluster` block."""

    runners: int = Field(default=2, ge=0)
    """Processes that play episodes and score them. With 0, episodes are played as without a cluster."""
    learners: int | None = Field(default=None, ge=1)
    """Processes that train a job of the adapter `local` together; by default the run's own process trains."""

    def check(self, folder: Path | None) -> str:
        """Return what the cluster has. `folder` has the user's modules. Raises EtudeError."""
        return f"{self.runners} runners, {self.learners or 0} learners"


class DatasetConfig(ComponentConfig):
    """The source of examples."""


class EvaluatorConfig(ComponentConfig):
    """Scores episodes: an entry of `eval.evaluators`."""


class AlarmConfig(ComponentConfig):
    """Watches a run for one problem: an entry of `finetuning.alarms`."""

    by_default: ClassVar[bool] = False
    """Whether it is on in runs whose config does not name it."""

    action: Action = "warn"
    """The run's action when the alarm rings. `stop` ends the run early; `off`: it never rings."""


class TrackerConfig(ComponentConfig):
    """Shows a run elsewhere: an entry of `report`."""

    def destination(self) -> str:
        """Return where it shows runs, in a few words. A tracker for another place gets all data anew."""
        return ""

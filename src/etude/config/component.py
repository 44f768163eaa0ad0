"""Typed component configs: the class behind every `_type` in a config file; prices and budgets of models.

And the parts that a workflow brings along, so that an environment is one line of a config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import BaseModel, Field, field_validator

from etude.core.call import Usage
from etude.core.data_model import DataModel
from etude.core.episode import ToolLimits, ToolSet, ToolSource
from etude.core.history import Action

CHANGEABLE = "changeable"
"""Marks a key that `etude resume -o` may set: `timeout: Annotated[float, CHANGEABLE] = Field(...)`. Such are
limits, patience, concurrency and memory; never what is trained."""

Usd: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Amount: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(gt=0)]


class TokenPrices(BaseModel, extra="forbid", frozen=True):
    """Prices of tokens, in USD for a million."""

    prompt: Usd
    """Of the tokens of prompts."""
    completion: Usd
    """Of sampled tokens, those of thinking included."""
    cached: Usd | None = None
    """Of tokens of prompts that the endpoint says it had in its cache; left out: as of others."""

    def usd(self, prompt: float, cached: float, completion: float) -> float:
        """The price of so many tokens. `prompt` includes what was `cached`."""
        of_cached = self.prompt if self.cached is None else self.cached
        return ((prompt - cached) * self.prompt + cached * of_cached + completion * self.completion) / 1e6


class ModelPrices(TokenPrices):
    """Prices of a model, in USD for a million tokens."""

    training: Usd | None = None
    """Of trained tokens, those of each epoch of a job counted; left out: not known."""
    fine_tuned: TokenPrices | None = None
    """Of calls of versions that training made; left out: as of the base model."""

    def of_call(self, usage: Usage, version: int) -> float:
        """The price of a call of a version; 0 is the base model."""
        prices = self.fine_tuned if version and self.fine_tuned is not None else self
        return prices.usd(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    def most_usd(self, usage: Usage) -> float:
        """The highest price of a call, of whatever version, with nothing in a cache."""
        both = (self, self.fine_tuned or self)
        return max(each.usd(usage.prompt_tokens, 0, usage.completion_tokens) for each in both)


class ModelBudget(BaseModel, extra="forbid", frozen=True):
    """The most that one model may take in a run, whoever asks it, its training included."""

    usd: Amount | None = None
    """US dollars."""
    tokens: Count | None = None
    """Tokens of prompts and sampled ones, and those that a backend says it trained on."""


class RunBudget(ModelBudget):
    """The most that a run may take. At a limit it stops, with all it has; with a larger one it goes on."""

    hours: Amount | None = None
    """Hours that the run is at work, those of its earlier processes included."""


Written: TypeAlias = Mapping[str, Any]
"""A component as a config file has it: `{"_type": "seeds", "size": 64}`."""


@dataclass(frozen=True, slots=True)
class Supplies:
    """Parts of a config that follow from its workflow. Each stands in only where the config names none."""

    dataset: Written | None = None
    """In place of `eval.general.dataset`."""
    validation: Written | None = None
    """In place of `finetuning.run_configuration.validation_dataset`."""
    evaluators: Mapping[str, Written] = field(default_factory=dict)
    """In place of `eval.evaluators`, all of them together."""
    reward: str | None = None
    """The one of them that is the reward where the config says nothing; needed where there are several."""
    reward_of_model: Mapping[str, str] = field(default_factory=dict)
    """The same for models that have a reward of their own, by their names in `llms`."""


class ComponentConfig(DataModel):
    """Base of all component configs. `class MyConfig(TrainerConfig, name="mine")` makes `_type: mine`.

    Unknown keys are errors, and a key's docstring is its description. The harness hands the reward function
    down by assignment.
    """

    type_name: ClassVar[str] = ""

    @classmethod
    def __pydantic_init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if name is not None:
            cls.type_name = name

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        """Takes `name` out of the class arguments; pydantic's own hook above stores it."""
        super().__init_subclass__(**kwargs)


class LlmConfig(ComponentConfig):
    """A model that agents can call: an entry of `llms`."""

    prices: Annotated[ModelPrices | None, CHANGEABLE] = None
    """The price of its tokens; left out: it is not known, and tokens alone are counted."""
    budget: Annotated[ModelBudget | None, CHANGEABLE] = None
    """The most that it may take in a run."""


class WorkflowConfig(ComponentConfig):
    """The user's agent: the `workflow` block."""

    target_functions: ClassVar[tuple[str, ...]] = ("<workflow>",)
    """The default of `finetuning.target_functions`; `*` stands for all functions."""

    def agents(self) -> Mapping[str, str | None] | None:
        """The agents, each with the entry of `llms` that it samples from (None: the default model).

        A call of an agent is one of the function with its name. None where that is not known before the
        workflow runs; then names of agents in the config are not checked. Raises EtudeError when the
        workflow cannot be made.
        """
        return None

    def supplies(self) -> Supplies:
        """The dataset and the evaluators that follow from this block, for a config that names none.

        Raises EtudeError when they cannot be told.
        """
        return Supplies()

    def missing(self) -> list[str]:
        """Programs, keys and packages that it cannot run without and that are not there, for `etude check`.

        A sentence each, with what to type. What shows when the workflow is built need not be named.
        """
        return []


class ToolsConfig(ComponentConfig):
    """Tools that agents call: an entry of `tools`."""

    max_calls: Annotated[int, CHANGEABLE] = Field(default=100, ge=1)
    """Calls of these tools in one episode. The model is told when there are no more."""
    max_characters: int = Field(default=20_000, ge=1)
    """Characters of one result. The rest is cut off, and the model is told so."""
    call_timeout: Annotated[float, CHANGEABLE] = Field(default=30.0, gt=0)
    """Seconds that one call may take. An episode whose tool takes longer fails."""
    only: list[str] | None = Field(default=None, min_length=1)
    """The tools that are offered; by default all."""
    prefix: str = Field(default="", pattern=r"^[A-Za-z0-9_-]*$")
    """Put before the name of each tool, to tell apart those of two sets."""

    def tool_set(self, name: str, source: ToolSource, path: str) -> ToolSet:
        """The tools of a source, as these keys bound them; `path` is where the keys stand."""
        limits = ToolLimits(self.max_calls, self.max_characters, self.call_timeout)
        only = None if self.only is None else tuple(self.only)
        return ToolSet(name, source, limits, only, self.prefix, path)


@dataclass(frozen=True, slots=True)
class Placement:
    """Whether processes of one kind have room on a cluster."""

    what: str
    """`runners` or `learners`."""
    detail: str
    is_ready: bool = True


class ClusterConfig(ComponentConfig):
    """Machines that play the episodes, and train: the `cluster` block."""

    runners: int = Field(default=2, ge=0)
    """Processes that play episodes and score them; 0: they are played as without a cluster."""
    learners: int | None = Field(default=None, ge=1)
    """Processes that train a job of the adapter `local` together; left out: the run's own process trains."""

    def check(self, folder: Path | None, *, on_gpus: bool = True) -> list[Placement]:
        """Whether there is room for the processes, for `etude check`; `folder` has the user's modules.

        `on_gpus`: whether learners use GPUs where there are any. Raises EtudeError where nobody can say.
        """
        counts = {"runners": self.runners, "learners": self.learners}
        return [Placement(what, f"{count} {what}") for what, count in counts.items() if count]


class DatasetConfig(ComponentConfig):
    """Where examples come from."""


class EvaluatorConfig(ComponentConfig):
    """Scores episodes: an entry of `eval.evaluators`."""


class AlarmConfig(ComponentConfig):
    """Looks out for what is wrong with a run: an entry of `finetuning.alarms`."""

    by_default: ClassVar[bool] = False
    """Whether it is on in runs whose config does not name it."""

    epochs: int = Field(default=1, ge=1)
    """Epochs in a row, or validations, that must be wrong before it rings."""
    action: Action = "warn"
    """The run's part when it rings. `pause` ends the process, and `etude resume` goes on; `stop` ends the run
    early; `rollback` goes back to the best version, and on from there; `off`: it never rings."""

    @field_validator("action", mode="before")
    @classmethod
    def _off_is_false_in_yaml(cls, value: Any) -> Any:
        return "off" if value is False else value


class TrackerConfig(ComponentConfig):
    """Shows a run to others: an entry of `report`."""

    patience: float = Field(default=30.0, ge=0)
    """Seconds that the end of the run waits at most until all is there. `etude report` sends the rest."""

    def destination(self) -> str:
        """Where it shows runs, in a few words. One that goes elsewhere is another tracker, which gets all."""
        return ""

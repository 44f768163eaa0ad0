"""Options that the workflows of all games have."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from etude.config.component import CHANGEABLE, WorkflowConfig
from etude.config.import_path import import_object
from etude.config.nearest import alternatives
from etude.config.supplies import Need, Supplies, package_need
from etude.core.errors import MissingExtraError, RequestError


class SizesConfig(WorkflowConfig):
    """How many examples an environment brings, and how long it may take."""

    package: ClassVar[str]
    """The import name of the library."""
    extra: ClassVar[str]

    size: int = Field(default=256, ge=1)
    """Training examples that it brings."""
    validation_size: int = Field(default=128, ge=1)
    """Held-out examples that it brings."""
    seed: int = Field(default=0, ge=0)
    """Draws other examples."""
    call_timeout: Annotated[float, CHANGEABLE] = Field(default=60.0, gt=0)
    """Seconds that a call into the environment may take."""
    timeout: Annotated[float | None, CHANGEABLE] = Field(default=None, gt=0)
    """Seconds that an episode may take."""

    def needs(self) -> list[Need]:
        """Its library."""
        return [package_need(self.package, self.extra)]

    @classmethod
    def library(cls, module: str | None = None) -> Any:
        """The library, or a module of it. Raises MissingExtraError where it is not installed."""
        if not package_need(cls.package, cls.extra).is_met:
            raise MissingExtraError(f"`_type: {cls.type_name}`", cls.extra)
        return importlib.import_module(module or cls.package)

    def datasets(self, kind: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """The two datasets that `Supplies` takes, of a dataset component of that kind."""
        shared = {**kind, "seed": self.seed}
        return {
            "dataset": {**shared, "size": self.size},
            "validation": {**shared, "size": self.validation_size, "split": "validation"},
        }


class GameConfig(SizesConfig):
    """Options of games that are played in turns."""

    prompt: str | None = None
    """Put before the first observation that a player is shown."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_turns: int = Field(default=50, ge=1)
    """Answers of all players after which the game is stopped."""
    history: bool = True
    """Whether a player is shown the whole game so far, or only the prompt and what is to be seen now."""

    def measures(self, seats: Mapping[str, str | None]) -> Supplies:
        """Seeds, and what a game measures: the reward (of several seats, of each), turns, invalid answers."""
        common = {name: {"_type": "measured", "name": name} for name in ("turns", "invalid")}
        datasets = self.datasets({"_type": "seeds"})
        if len(seats) < 2:
            reward = {"reward": {"_type": "measured", "name": "reward"}}
            return Supplies(**datasets, evaluators=reward | common, reward="reward")
        rewards = {seat: f"reward_{seat}" for seat in seats}
        by_model: dict[str, str] = {}
        for seat, model in seats.items():
            if model is not None:
                by_model.setdefault(model, rewards[seat])
        own = {name: {"_type": "measured", "agent": seat} for seat, name in rewards.items()}
        return Supplies(
            **datasets,
            evaluators=own | common,
            reward=next(iter(rewards.values())),
            reward_of_model=by_model,
        )


def own_maker(path: str, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """A function that makes the environment of a user's own. Raises RequestError for what makes none."""
    make = import_object(path)
    if not callable(make):
        raise RequestError(f"id: '{path}' is no class or function that makes an environment")
    return lambda: make(**arguments)


def own_function(path: str | None, key: str) -> Callable[..., Any] | None:
    """The function that a key names. Raises RequestError for what is none."""
    if path is None:
        return None
    function = import_object(path)
    if not callable(function):
        raise RequestError(f"{key}: '{path}' is no function")
    made: Callable[..., Any] = function
    return made


def unknown(what: str, name: str, known: Any) -> RequestError:
    """The error about an environment that a library does not have, with the nearest name."""
    return RequestError(f"there is no {what} '{name}'" + alternatives(name, sorted(known)))

"""The models that an agent may call, by the names the config gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from etude.core.call import Sampling
from etude.core.errors import RequestError
from etude.core.interfaces import Engine


@dataclass(frozen=True, slots=True)
class Models:
    """Engines by name, how each samples by default, and which one is meant when none is named."""

    engines: Mapping[str, Engine]
    sampling: Mapping[str, Sampling] = field(default_factory=dict)
    default: str | None = None

    def __post_init__(self) -> None:
        """Raises RequestError when there are no models, or the default is none of them."""
        if not self.engines:
            raise RequestError("there are no models for the agent to call; add an entry to `llms`")
        for name in (*self.sampling, *((self.default,) if self.default is not None else ())):
            self.require(name)

    def choose(self, name: str | None) -> str:
        """The name of the model that is meant. Raises RequestError when that is not clear."""
        if name is not None:
            return self.require(name)
        if self.default is not None:
            return self.default
        if len(self.engines) > 1:
            raise RequestError(f"name the model to call, there are several: {', '.join(self.engines)}")
        return next(iter(self.engines))

    def require(self, name: str) -> str:
        """`name` itself when it is a model. Raises RequestError naming the models there are."""
        if name not in self.engines:
            raise RequestError(f"there is no model '{name}'; models: {', '.join(self.engines)}")
        return name

    def sampling_of(self, name: str) -> Sampling:
        """How a model samples when nothing else is asked for."""
        return self.sampling.get(name) or Sampling()

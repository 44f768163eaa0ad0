"""The component registry: what each `_type` in a config stands for.

Components register themselves when their module is imported. Installed packages name such modules
under the entry-point group `etude.components`; they are imported once, on the first lookup.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from etude.config.component import ComponentConfig, DatasetConfig, EvaluatorConfig, LlmConfig, WorkflowConfig
from etude.config.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from etude.config.import_path import where_defined
from etude.config.nearest import alternatives
from etude.core.errors import RequestError
from etude.core.user_code import note_user_module

if TYPE_CHECKING:
    from etude.config.builder import Builder

Kind: TypeAlias = Literal[
    "llms", "workflow", "datasets", "evaluators", "trajectory_builders", "trainer_adapters", "trainers"
]
Factory: TypeAlias = "Callable[[Any, Builder], AsyncIterator[Any]]"
FactoryT = TypeVar("FactoryT", bound=Callable[..., AsyncIterator[Any]])

ENTRY_POINT_GROUP = "etude.components"

BASES: dict[Kind, type[ComponentConfig]] = {
    "llms": LlmConfig,
    "workflow": WorkflowConfig,
    "datasets": DatasetConfig,
    "evaluators": EvaluatorConfig,
    "trajectory_builders": TrajectoryBuilderConfig,
    "trainer_adapters": TrainerAdapterConfig,
    "trainers": TrainerConfig,
}

NOUNS: dict[Kind, str] = {
    "llms": "model",
    "workflow": "workflow",
    "datasets": "dataset",
    "evaluators": "evaluator",
    "trajectory_builders": "trajectory builder",
    "trainer_adapters": "trainer adapter",
    "trainers": "trainer",
}


@dataclass(frozen=True, slots=True)
class Registration:
    """A component type: its name, the class of its config, and what builds it."""

    kind: Kind
    name: str
    config_type: type[ComponentConfig]
    factory: Factory
    module: str
    fault: str | None = None
    """Why it cannot be used: told when it is, so that the rest of its module can be."""


class Registry:
    """Registrations by kind and name."""

    def __init__(self, entry_points: str | None = ENTRY_POINT_GROUP) -> None:
        self._entry_points = entry_points
        self._registrations: dict[tuple[Kind, str], Registration] = {}

    def add(self, new: Registration) -> None:
        """Raises RequestError when another class has the name; the same class again takes its place."""
        old = self._registrations.get((new.kind, new.name))
        if old is not None and _home(old.config_type) != _home(new.config_type):
            raise RequestError(
                f"two {NOUNS[new.kind]} types are called '{new.name}': {old.config_type.__qualname__} "
                f"of module {old.module} and {new.config_type.__qualname__} of module {new.module}. "
                "Rename one of them"
            )
        self._registrations[new.kind, new.name] = new

    def load_entry_points(self) -> None:
        """Import the modules that installed packages name, the first time.

        Raises RequestError when one cannot be imported, naming the package it came with.
        """
        group, self._entry_points = self._entry_points, None
        if group is None:
            return
        import importlib.metadata  # Only here: it takes as long to import as all of this room.

        for entry_point in importlib.metadata.entry_points(group=group):
            note_user_module(entry_point.module)
            try:
                entry_point.load()
            except Exception as error:
                self._entry_points = group
                package = entry_point.dist.name if entry_point.dist else "an unknown package"
                raise RequestError(
                    f"the components of the installed package '{package}' cannot be loaded: "
                    f"importing {entry_point.value} raised {type(error).__name__}: {error}. "
                    "Fix or uninstall that package"
                ) from error

    def names(self, kind: Kind) -> list[str]:
        """The registered types of a kind, sorted."""
        self.load_entry_points()
        return sorted(name for registered, name in self._registrations if registered == kind)

    def lookup(self, kind: Kind, name: str) -> Registration:
        """Raises RequestError for an unknown type, with the nearest known one, and for a faulty one."""
        self.load_entry_points()
        if (kind, name) in self._registrations:
            known = self._registrations[kind, name]
            if known.fault is not None:
                raise RequestError(known.fault)
            return known
        elsewhere = [NOUNS[other] for other in BASES if (other, name) in self._registrations]
        if elsewhere:
            sentence = f"'{name}' is registered as {elsewhere[0]}, not as {NOUNS[kind]}"
        else:
            sentence = f"there is no {NOUNS[kind]} type '{name}'"
        raise RequestError(sentence + alternatives(name, self.names(kind), otherwise="none is registered"))

    def of_object(self, kind: Kind, value: object) -> Registration | None:
        """The registration of a decorated generator function, or of a config class; None without one."""
        for registration in self._registrations.values():
            if registration.kind == kind and value in (registration.factory, registration.config_type):
                return registration
        return None


_registry = Registry()


def lookup(kind: Kind, name: str) -> Registration:
    """The registration behind `_type: name`. Raises RequestError for an unknown one."""
    return _registry.lookup(kind, name)


def names(kind: Kind) -> list[str]:
    """The registered types of a kind, sorted."""
    return _registry.names(kind)


def of_object(kind: Kind, value: object) -> Registration | None:
    """The registration of a decorated generator function, or of a config class; None without one."""
    return _registry.of_object(kind, value)


def load_entry_points() -> None:
    """Import what installed packages register. Raises RequestError when a package is broken."""
    _registry.load_entry_points()


@contextlib.contextmanager
def isolated() -> Iterator[Registry]:
    """An empty registry without entry points for the duration, for tests."""
    global _registry
    before, _registry = _registry, Registry(entry_points=None)
    try:
        yield _registry
    finally:
        _registry = before


def register_llm(*, config_type: type[LlmConfig]) -> Callable[[FactoryT], FactoryT]:
    """Decorate an async generator `f(config, builder)` that yields an `Engine`."""
    return _decorator("llms", config_type)


def register_workflow(*, config_type: type[WorkflowConfig]) -> Callable[[FactoryT], FactoryT]:
    """Decorate an async generator `f(config, builder)` that yields a workflow."""
    return _decorator("workflow", config_type)


def register_dataset(*, config_type: type[DatasetConfig]) -> Callable[[FactoryT], FactoryT]:
    """Decorate an async generator `f(config, builder)` that yields an object with `examples()`."""
    return _decorator("datasets", config_type)


def register_evaluator(*, config_type: type[EvaluatorConfig]) -> Callable[[FactoryT], FactoryT]:
    """Decorate an async generator `f(config, builder)` that yields an `Evaluator`."""
    return _decorator("evaluators", config_type)


def register_trajectory_builder(
    *, config_type: type[TrajectoryBuilderConfig]
) -> Callable[[FactoryT], FactoryT]:
    """Decorate an async generator `f(config, builder)` that yields a `TrajectoryBuilder`."""
    return _decorator("trajectory_builders", config_type)


def register_trainer_adapter(*, config_type: type[TrainerAdapterConfig]) -> Callable[[FactoryT], FactoryT]:
    """Decorate an async generator `f(config, builder)` that yields a `TrainerAdapter`."""
    return _decorator("trainer_adapters", config_type)


def register_trainer(*, config_type: type[TrainerConfig]) -> Callable[[FactoryT], FactoryT]:
    """Decorate an async generator `f(config, builder)` that yields a `Trainer`."""
    return _decorator("trainers", config_type)


def _decorator(kind: Kind, config_type: type[ComponentConfig]) -> Callable[[FactoryT], FactoryT]:
    def register(factory: FactoryT) -> FactoryT:
        fault = _fault(kind, config_type, factory)
        name = config_type.type_name or config_type.__qualname__
        _registry.add(Registration(kind, name, config_type, factory, config_type.__module__, fault))
        return factory

    return register


def _fault(kind: Kind, config_type: type[ComponentConfig], factory: Callable[..., object]) -> str | None:
    """Why a decorated function makes no component, with its file and line; None when it does."""
    base, where = BASES[kind], where_defined(factory)
    if not issubclass(config_type, base):
        return f"{where}: {config_type.__qualname__} must inherit from {base.__name__} to be a {NOUNS[kind]}"
    if not config_type.type_name:
        example = f'class {config_type.__name__}({base.__name__}, name="…")'
        return f"{where}: {config_type.__qualname__} has no name for `_type`; write {example}"
    if not inspect.isasyncgenfunction(factory):
        return (
            f"{where}: {factory.__qualname__} must be an async generator: "
            "`async def …(config, builder):` with one `yield`"
        )
    try:
        inspect.signature(factory).bind(None, None)
    except TypeError as error:
        return f"{where}: {factory.__qualname__} is called with (config, builder): {error}"
    return None


def _home(config_type: type) -> tuple[str, str]:
    """Where a class is written: the same for a module that is imported again, or run as `__main__`."""
    module = sys.modules.get(config_type.__module__)
    return getattr(module, "__file__", None) or config_type.__module__, config_type.__qualname__

"""The component registry, which finds the component for each `_type` in a config.

Components register themselves when their module is imported. Installed packages name such modules under the
entry-point group `etude.components`. They are imported once, on the first lookup.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args

from pydantic import BaseModel

from etude.config.component import (
    AlarmConfig,
    ClusterConfig,
    ComponentConfig,
    DatasetConfig,
    EvaluatorConfig,
    LlmConfig,
    ToolsConfig,
    TrackerConfig,
    WorkflowConfig,
)
from etude.config.document import KeyPath, dig
from etude.config.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from etude.config.import_path import note_user_module, where_defined
from etude.core.errors import RequestError, alternatives

Kind: TypeAlias = Literal[
    "llms",
    "workflow",
    "tools",
    "datasets",
    "evaluators",
    "trajectory_builders",
    "trainer_adapters",
    "trainers",
    "alarms",
    "cluster",
    "trackers",
]
Factory: TypeAlias = Callable[..., AsyncIterator[Any]]
FactoryT = TypeVar("FactoryT", bound=Factory)
ConfigT = TypeVar("ConfigT", bound=ComponentConfig)

ENTRY_POINT_GROUP = "etude.components"

BASES: dict[Kind, type[ComponentConfig]] = {}
"""The base of the configs of each kind."""

NOUNS: dict[Kind, str] = {kind: kind.removesuffix("s").replace("_", " ") for kind in get_args(Kind)} | {
    "llms": "model",
    "tools": "tool set",
}

NAMED: dict[Kind, KeyPath] = {
    "llms": ("llms",),
    "tools": ("tools",),
    "evaluators": ("eval", "evaluators"),
    "trajectory_builders": ("trajectory_builders",),
    "trainer_adapters": ("trainer_adapters",),
    "trainers": ("trainers",),
    "alarms": ("finetuning", "alarms"),
}
"""Sections that hold components by name."""

DATASET: KeyPath = ("eval", "general", "dataset")
VALIDATION: KeyPath = ("finetuning", "run_configuration", "validation_dataset")
OTHER_DATASETS: tuple[KeyPath, ...] = (("finetuning", "run_configuration", "dataset"), VALIDATION)

SINGLE: dict[KeyPath, Kind] = {
    ("workflow",): "workflow",
    ("cluster",): "cluster",
    **dict.fromkeys((DATASET, *OTHER_DATASETS), "datasets"),
}
"""Keys that hold one component."""

LISTED: dict[Kind, KeyPath] = {"trackers": ("report",)}
"""Keys that hold a list of components."""

LIVE = "live"
"""For each kind, the type of a live object that a program passes, which no file can name."""


def components_in(data: dict[str, Any]) -> Iterator[tuple[KeyPath, Kind]]:
    """Yield each component's path and kind, in the order of `SINGLE`, `NAMED` and `LISTED`."""
    yield from ((path, kind) for path, kind in SINGLE.items() if dig(data, path) is not None)
    for kind, section in NAMED.items():
        entries = dig(data, section)
        yield from (((*section, name), kind) for name in (list(entries) if isinstance(entries, dict) else ()))
    for kind, section in LISTED.items():
        entries = dig(data, section)
        yield from (
            ((*section, index), kind) for index in range(len(entries if isinstance(entries, list) else ()))
        )


def section(config: BaseModel, kind: Kind) -> Mapping[str, ComponentConfig]:
    """Return a config's components of a kind. Raises KeyError for a kind whose components have no names."""
    part: Any = config
    for key in NAMED[kind]:
        part = getattr(part, str(key))
    entries: Mapping[str, ComponentConfig] = part
    return entries


@dataclass(frozen=True, slots=True)
class Registration:
    """A component type: its name, its config class, and the factory that builds it."""

    name: str
    config_type: type[ComponentConfig]
    factory: Factory
    fault: str | None = None
    """Why it cannot be used. It is raised on use, so that the rest of its module still works."""


_registrations: dict[tuple[Kind, str], Registration] = {}
_unread_group: str | None = ENTRY_POINT_GROUP
"""The entry-point group whose modules are not imported yet."""


def load_entry_points() -> None:
    """Import the modules that installed packages name, at the first call.

    Raises RequestError, which names the package, if one cannot be imported.
    """
    global _unread_group
    group, _unread_group = _unread_group, None
    if group is None:
        return
    import importlib.metadata  # Imported here because it takes as long as all imports of this folder.

    for entry_point in importlib.metadata.entry_points(group=group):
        note_user_module(entry_point.module)
        try:
            entry_point.load()
        except Exception as error:
            _unread_group = group
            package = entry_point.dist.name if entry_point.dist else "an unknown package"
            raise RequestError(
                f"the components of the installed package '{package}' cannot be loaded: "
                f"importing {entry_point.value} raised {type(error).__name__}: {error}. "
                "Fix or uninstall that package"
            ) from error


def names(kind: Kind) -> list[str]:
    """Return the registered types of a kind, sorted."""
    load_entry_points()
    return sorted(name for registered, name in _registrations if registered == kind)


def lookup(kind: Kind, name: str) -> Registration:
    """Return the registration for `_type: name`.

    Raises RequestError for an unknown type, with the nearest known one, and for a faulty one.
    """
    load_entry_points()
    if (known := _registrations.get((kind, name))) is not None:
        if known.fault is not None:
            raise RequestError(known.fault)
        return known
    sentence = f"there is no {NOUNS[kind]} type '{name}'"
    if others := [NOUNS[other] for other in BASES if (other, name) in _registrations]:
        sentence = f"'{name}' is registered as {others[0]}, not as {NOUNS[kind]}"
    raise RequestError(sentence + alternatives(name, names(kind), otherwise="none is registered"))


def find_registration(kind: Kind, value: object) -> Registration | None:
    """Return the registration of a decorated generator function or a config class; None without one."""
    known = (entry for (registered, _), entry in _registrations.items() if registered == kind)
    return next((entry for entry in known if value in (entry.factory, entry.config_type)), None)


class Decorator(Generic[ConfigT]):
    """Decorates an async generator `f(config, builder)` that yields a component of one kind."""

    def __init__(self, kind: Kind, base: type[ConfigT], yields: str) -> None:
        self._kind, BASES[kind] = kind, base
        self.__doc__ = f"Decorate an async generator `f(config, builder)` that yields {yields}."

    def __call__(self, *, config_type: type[ConfigT]) -> Callable[[FactoryT], FactoryT]:
        """Register a factory. Raises RequestError if another class has the name.

        If the same class comes again, as when its module is reimported, it replaces the first.
        """
        kind = self._kind

        def register(factory: FactoryT) -> FactoryT:
            name = config_type.type_name or config_type.__qualname__
            old = _registrations.get((kind, name))
            if old is not None and _home(old.config_type) != _home(config_type):
                first, second = (
                    f"{known.__qualname__} of module {known.__module__}"
                    for known in (old.config_type, config_type)
                )
                raise RequestError(
                    f"two {NOUNS[kind]} types are called '{name}': {first} and {second}. Rename one of them"
                )
            fault = _fault(kind, config_type, factory)
            _registrations[kind, name] = Registration(name, config_type, factory, fault)
            return factory

        return register


register_llm = Decorator("llms", LlmConfig, "an `Engine`")
register_workflow = Decorator("workflow", WorkflowConfig, "a workflow")
register_tools = Decorator("tools", ToolsConfig, "a `ToolSource`")
register_dataset = Decorator("datasets", DatasetConfig, "an object with `examples()`")
register_evaluator = Decorator("evaluators", EvaluatorConfig, "an `Evaluator`")
register_trajectory_builder = Decorator(
    "trajectory_builders", TrajectoryBuilderConfig, "a `TrajectoryBuilder`"
)
register_trainer_adapter = Decorator("trainer_adapters", TrainerAdapterConfig, "a `TrainerAdapter`")
register_trainer = Decorator("trainers", TrainerConfig, "a `Trainer`")
register_alarm = Decorator("alarms", AlarmConfig, "an `etude.Alarm`")
register_cluster = Decorator("cluster", ClusterConfig, "an `etude.processes.pool.Cluster`")
register_tracker = Decorator("trackers", TrackerConfig, "an `etude.Tracker`")


def config_factory(make: Callable[[Any], object]) -> Factory:
    """Return the factory of a component that is made from its config alone, and has nothing to close."""

    async def made(config: Any, builder: object) -> AsyncIterator[Any]:
        yield make(config)

    return made


def _fault(kind: Kind, config_type: type[ComponentConfig], factory: Callable[..., object]) -> str | None:
    """Return why a decorated function makes no component, with its file and line; None if it does."""
    base, where = BASES[kind], where_defined(factory)
    if not issubclass(config_type, base):
        return f"{where}: {config_type.__qualname__} must inherit from {base.__name__} to be a {NOUNS[kind]}"
    if not config_type.type_name:
        example = f'class {config_type.__name__}({base.__name__}, name="…")'
        return f"{where}: {config_type.__qualname__} has no name for `_type`; write {example}"
    if not inspect.isasyncgenfunction(factory):
        form = "`async def …(config, builder):` with one `yield`"
        return f"{where}: {factory.__qualname__} must be an async generator: {form}"
    try:
        inspect.signature(factory).bind(None, None)
    except TypeError as error:
        return f"{where}: {factory.__qualname__} is called with (config, builder): {error}"
    return None


def _home(config_type: type) -> tuple[str, str]:
    """Return the place of a class, which stays the same if its module is reimported or run as `__main__`."""
    module = sys.modules.get(config_type.__module__)
    return getattr(module, "__file__", None) or config_type.__module__, config_type.__qualname__

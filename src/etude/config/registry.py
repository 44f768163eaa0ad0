"""The component registry, which finds the component for each `_type` in a config.

Components register themselves when their module is imported. Installed packages name such modules under the
entry-point group `etude.components`. They are imported once, on the first lookup.
"""

import importlib.metadata
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Generic, TypeAlias, TypeVar

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
from etude.config.document import KeyPath
from etude.config.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from etude.config.import_path import import_object, is_import_path, note_user_module, where_defined
from etude.config.key_types import show_value
from etude.core.errors import RequestError, alternatives

Kind: TypeAlias = str
"""A key of `KINDS`, such as `llms`."""

Factory: TypeAlias = Callable[..., AsyncIterator[Any]]
FactoryT = TypeVar("FactoryT", bound=Factory)
ConfigT = TypeVar("ConfigT", bound=ComponentConfig)

ENTRY_POINT_GROUP = "etude.components"

DATASET: KeyPath = ("eval", "general", "dataset")
VALIDATION: KeyPath = ("finetuning", "run_configuration", "validation_dataset")
OTHER_DATASETS: tuple[KeyPath, ...] = (("finetuning", "run_configuration", "dataset"), VALIDATION)

FILE_TYPES = {".json": "json", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
"""Dataset types by the suffix of the file."""

FUNCTION_TYPES: dict[Kind, str] = {
    "workflow": "function",
    "evaluators": "function",
    "datasets": "python",
    "trackers": "function",
}
"""The types that take a plain Python function, under the key `function`."""

LIVE = "live"
"""The type of components that a program passes as objects. No config file can name it."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A component type: its name, its config class, and the factory that builds it."""

    name: str
    config_type: type[ComponentConfig]
    factory: Factory


_registrations: dict[tuple[Kind, str], Registration] = {}
_unread_group: str | None = ENTRY_POINT_GROUP
"""The entry-point group whose modules are not imported yet."""


def load_entry_points() -> None:
    """Import the modules that installed packages name, once. Raises RequestError, which names the package."""
    global _unread_group
    group, _unread_group = _unread_group, None
    if group is None:
        return
    for entry_point in importlib.metadata.entry_points(group=group):
        note_user_module(entry_point.module)
        try:
            entry_point.load()
        except (Exception, SystemExit) as error:
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
    """Return the registration for `_type: name`. Raises RequestError with the nearest known type."""
    load_entry_points()
    if (known := _registrations.get((kind, name))) is not None:
        return known
    sentence = f"there is no {KINDS[kind].noun} type '{name}'"
    raise RequestError(sentence + alternatives(name, names(kind), otherwise="none is registered"))


def find_registration(kind: Kind, value: object) -> Registration | None:
    """Return the registration of a decorated generator function or a config class; None without one."""
    known = (entry for (registered, _), entry in _registrations.items() if registered == kind)
    return next((entry for entry in known if value in (entry.factory, entry.config_type)), None)


class Decorator(Generic[ConfigT]):
    """A kind of component. It decorates an async generator `f(config, builder)` that yields one."""

    def __init__(
        self,
        kind: Kind,
        base: type[ConfigT],
        yields: str,
        *places: KeyPath,
        noun: str = "",
        is_single: bool = False,
    ) -> None:
        """`base` is the base of its configs. They stand at `places`, under names or in a list, or alone
        (`is_single`). `noun` is the kind in a sentence."""
        self.kind, self.base, self.places, self.is_single = kind, base, places or ((kind,),), is_single
        self.noun = noun or kind.removesuffix("s").replace("_", " ")
        KINDS[kind] = self
        self.__doc__ = f"Decorate an async generator `f(config, builder)` that yields {yields}."

    def __call__(self, *, config_type: type[ConfigT]) -> Callable[[FactoryT], FactoryT]:
        """Register a factory. Raises RequestError if it makes no component, or another class has the name.

        If the same class comes again, as when its module is reimported, it replaces the first.
        """
        kind = self.kind

        def register(factory: FactoryT) -> FactoryT:
            if (fault := _fault(kind, config_type, factory)) is not None:
                raise RequestError(fault)
            name = config_type.type_name
            old = _registrations.get((kind, name))
            if old is not None and _home(old.config_type) != _home(config_type):
                first, second = (
                    f"{known.__qualname__} of module {known.__module__}"
                    for known in (old.config_type, config_type)
                )
                raise RequestError(
                    f"two {self.noun} types are called '{name}': {first} and {second}. Rename one of them"
                )
            _registrations[kind, name] = Registration(name, config_type, factory)
            return factory

        return register


KINDS: dict[Kind, Decorator[Any]] = {}
"""Each kind of component, with its places in a config and its decorator."""

register_llm = Decorator("llms", LlmConfig, "an `Engine`", noun="model")
register_workflow = Decorator("workflow", WorkflowConfig, "a workflow", is_single=True)
register_tools = Decorator("tools", ToolsConfig, "a `ToolSource`", noun="tool set")
register_dataset = Decorator(
    "datasets", DatasetConfig, "an object with `examples()`", DATASET, *OTHER_DATASETS, is_single=True
)
register_evaluator = Decorator("evaluators", EvaluatorConfig, "an `Evaluator`", ("eval", "evaluators"))
register_trajectory_builder = Decorator(
    "trajectory_builders", TrajectoryBuilderConfig, "a `TrajectoryBuilder`"
)
register_trainer_adapter = Decorator("trainer_adapters", TrainerAdapterConfig, "a `TrainerAdapter`")
register_trainer = Decorator("trainers", TrainerConfig, "a `Trainer`")
register_alarm = Decorator("alarms", AlarmConfig, "an `etude.Alarm`", ("finetuning", "alarms"))
register_cluster = Decorator("cluster", ClusterConfig, "an `etude.processes.pool.Cluster`", is_single=True)
register_tracker = Decorator("trackers", TrackerConfig, "an `etude.Tracker`", ("report",))


def spell_out(kind: Kind, value: Any) -> dict[str, Any]:
    """Return a component as a mapping whose `_type` is a registered name, if there is one.

    `workflow: my_agent:play` is `{_type: function, function: my_agent:play}`, and `dataset: data/train.jsonl`
    is `{_type: jsonl, file_path: data/train.jsonl}`. Both may also be the `_type` of a mapping with more
    keys. Imports the objects of import paths. Raises RequestError for a value that cannot be a component.
    """
    if not isinstance(value, str | dict):
        raise RequestError(f"expected a mapping with `_type`, or the type alone, found {show_value(value)}")
    keys = dict(value) if isinstance(value, dict) else {"_type": value}
    written = keys.get("_type")
    if written is None and kind in FUNCTION_TYPES and "function" in keys:
        written = keys["_type"] = FUNCTION_TYPES[kind]
    elif written is None and kind == "datasets" and isinstance(keys.get("file_path"), str):
        return keys | {"_type": _file_type(keys["file_path"])}
    if isinstance(written, str) and is_import_path(written):
        registration = find_registration(kind, import_object(written))
        if registration is not None:
            return keys | {"_type": registration.name}
        if kind in FUNCTION_TYPES:
            return keys | {"_type": FUNCTION_TYPES[kind], "function": written}
        raise RequestError(
            f"'{written}' is not registered as {KINDS[kind].noun}: it needs one of the decorators "
            "etude.register_…"
        )
    if isinstance(written, str) and kind == "datasets" and ("." in written or "/" in written):
        return keys | {"_type": _file_type(written), "file_path": written}
    if isinstance(function := keys.get("function"), str) and written == FUNCTION_TYPES.get(kind):
        import_object(function)
    return keys


def _file_type(file: str) -> str:
    suffix = PurePath(file).suffix.lower()
    if suffix not in FILE_TYPES or "://" in file:
        allowed = ", ".join(FILE_TYPES)
        raise RequestError(f"'{file}' is not the path of a file with a known suffix. Allowed: {allowed}")
    return FILE_TYPES[suffix]


def config_factory(make: Callable[[Any], object]) -> Factory:
    """Return the factory of a component that is made from its config alone, and has nothing to close."""

    async def build(config: Any, builder: object) -> AsyncIterator[Any]:
        yield make(config)

    return build


def _fault(kind: Kind, config_type: type[ComponentConfig], factory: Callable[..., object]) -> str | None:
    """Return why a decorated function makes no component, with its file and line; None if it does."""
    base, noun, where = KINDS[kind].base, KINDS[kind].noun, where_defined(factory)
    if not issubclass(config_type, base):
        return f"{where}: {config_type.__qualname__} must inherit from {base.__name__} to be a {noun}"
    if not config_type.type_name:
        example = f'class {config_type.__name__}({base.__name__}, name="…")'
        return f"{where}: {config_type.__qualname__} has no name for `_type`; write {example}"
    if not inspect.isasyncgenfunction(factory):
        form = "`async def …(config, builder):` with one `yield`"
        return f"{where}: {factory.__qualname__} must be an async generator: {form}"
    return None


def _home(config_type: type) -> tuple[str, str]:
    """Return the place of a class, which stays the same if its module is reimported or run as `__main__`."""
    module = sys.modules.get(config_type.__module__)
    return getattr(module, "__file__", None) or config_type.__module__, config_type.__qualname__

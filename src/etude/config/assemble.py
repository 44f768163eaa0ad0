"""Builds the config objects of components from the mappings of a config.

Components have short forms: `workflow: my_agent:play` is `{_type: function, function: my_agent:play}`, and
`dataset: data/train.jsonl` is `{_type: jsonl, file_path: data/train.jsonl}`. Both may also be the `_type` of
a mapping with more keys. `reward_collapse: stop` is `{_type: reward_collapse, action: stop}`. `{above: 3}`
under an alarm's name has this name as its type, and `alarms: off` turns all alarms off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, TypeAlias, get_args

from pydantic import ValidationError

from etude.config import registry
from etude.config.component import AlarmConfig, ComponentConfig, Entries, Supplies, WorkflowConfig
from etude.config.document import Document, KeyPath, Override, holds, replace_at, set_at, value_at
from etude.config.import_path import import_object, is_import_path
from etude.config.key_types import KeyType, Problems, show_value
from etude.config.registry import DATASET, KINDS, OTHER_DATASETS, VALIDATION, Kind
from etude.config.schema import Config
from etude.core.errors import EtudeError, RequestError, alternatives, nearest
from etude.core.history import Action

Spelled: TypeAlias = dict[str, Any] | ComponentConfig | None

FILE_TYPES = {".json": "json", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
"""Dataset types by the suffix of the file."""

FUNCTION_TYPES: dict[Kind, str] = {
    "workflow": "function",
    "evaluators": "function",
    "datasets": "python",
    "trackers": "function",
}
"""The types that take a plain Python function, under the key `function`."""


def components_in(data: dict[str, Any]) -> Iterator[tuple[KeyPath, Kind]]:
    """Yield each component's path and kind."""
    for kind, about in KINDS.items():
        for place in about.places:
            value = value_at(data, place)
            if about.is_single:
                yield from [(place, kind)] if value is not None else []
            elif isinstance(value, list if kind == "trackers" else dict):
                keys = list(value) if isinstance(value, dict) else range(len(value))
                yield from (((*place, key), kind) for key in keys)


def build_components(data: dict[str, Any], problems: Problems, folders: Sequence[Path]) -> None:
    """Replace the components in `data` by config objects. An invalid one is a problem, and an empty config of
    its kind. Files are looked for in `folders`."""
    spell_out_alarms(data, problems)
    kinds, assembly = dict(components_in(data)), _Assembly(problems, folders)
    # All import paths first, because importing a module may register the types that other components name.
    spelled = {path: assembly.spell_out(path, kind, value_at(data, path)) for path, kind in kinds.items()}
    for path in OTHER_DATASETS:
        if isinstance(second := spelled.get(path), dict) and isinstance(value_at(data, path), str):
            spelled[path] = _with_columns(second, spelled.get(DATASET))
    for path, kind in kinds.items():
        replace_at(data, path, assembly.validate(path, kind, spelled[path]) or KINDS[kind].base())
    if isinstance(workflow := data.get("workflow"), WorkflowConfig):
        try:
            _add_supplies(data, workflow.supplies(), assembly)
        except EtudeError as error:
            problems.add(("workflow",), str(error))


def _add_supplies(data: dict[str, Any], supplies: Supplies, assembly: _Assembly) -> None:
    """Add a workflow's supplies to `data` where it names nothing."""
    written: dict[KeyPath, tuple[Kind, Entries]] = {}
    if supplies.dataset and value_at(data, DATASET) is None and value_at(data, OTHER_DATASETS[0]) is None:
        written[DATASET] = "datasets", supplies.dataset
    # `null` is a valid value: no validation.
    if supplies.validation and not holds(value_at(data, VALIDATION[:-1]), VALIDATION[-1]):
        written[VALIDATION] = "datasets", supplies.validation
    if supplies.evaluators and not value_at(data, KINDS["evaluators"].places[0]):
        written |= {
            (*KINDS["evaluators"].places[0], name): ("evaluators", it)
            for name, it in supplies.evaluators.items()
        }
        _choose_rewards(data, supplies)
    for path, (kind, spelled) in written.items():
        if (component := assembly.validate(path, kind, dict(spelled))) is not None:
            with suppress(RequestError):  # A given object has its own.
                set_at(data, Override(path, component))


def _choose_rewards(data: dict[str, Any], supplies: Supplies) -> None:
    """Set the supplied reward of each trained model, if the config names none."""
    block = data.get("finetuning")
    if not isinstance(block, dict) or block.get("reward_function") is not None:
        return
    if not isinstance(targets := block.get("targets"), dict):
        reward = supplies.reward_of_model.get(str(block.get("target_model")), supplies.reward)
        block |= {"reward_function": {"name": reward}} if reward else {}
        return
    for name, target in targets.items():
        target = {} if target is None else target
        if isinstance(target, dict) and target.get("reward_function") is None:
            reward = supplies.reward_of_model.get(str(target.get("model") or name), supplies.reward)
            targets[name] = target | ({"reward_function": {"name": reward}} if reward else {})


def parse_components(kind: Kind, sources: Mapping[KeyPath, Any], config: Config) -> list[Any]:
    """Return the configs of components of one kind that are not in a config itself. Raises ConfigError."""
    config_file = config.finetuning.run_configuration.config_file
    problems = Problems(Document({}))
    assembly = _Assembly(problems, [config_file.parent if config_file else Path(), Path()])
    spelled = {path: assembly.spell_out(path, kind, source) for path, source in sources.items()}
    for path, each in spelled.items():
        if kind == "datasets" and isinstance(each, dict):
            spelled[path] = _with_columns(each, config.eval.general.dataset)
    components = [assembly.validate(path, kind, each) for path, each in spelled.items()]
    problems.raise_if_any()
    return components


def _with_columns(spelled: dict[str, Any], first: Spelled) -> dict[str, Any]:
    """Copy the first file's column settings to a second file of examples, unless it has its own."""
    if "file_path" not in spelled or first is None:
        return spelled
    known = first.model_dump(exclude_unset=True) if isinstance(first, ComponentConfig) else first
    return {key: known[key] for key in ("id_key", "inputs", "expected") if key in known} | spelled


class _Assembly:
    """Makes config objects of a config's components, and adds the problems."""

    def __init__(self, problems: Problems, folders: Sequence[Path]) -> None:
        self._problems, self._folders = problems, folders

    def spell_out(self, path: KeyPath, kind: Kind, value: Any) -> Spelled:
        """Return the component with its shorthand spelled out; None if that is not possible."""
        if isinstance(value, ComponentConfig):
            return value
        source = (*path, "_type") if isinstance(value, dict) else path
        if self._problems.within(source):
            return None
        try:
            spelled = spell_out(kind, value)
        except RequestError as error:
            self._problems.add(path, str(error), at=source)
            return None
        # Keep references to the environment, and the import path of a registered type, to write them back.
        references = self._problems.references
        written = value.get("_type") if isinstance(value, dict) else value
        key = next((key for key in ("function", "file_path") if spelled.get(key) == written), "_type")
        if source in references:
            references[*path, key] = references.pop(source)
        elif written is not None and written not in spelled.values():
            references[*path, "_type"] = written
        return spelled

    def validate(self, path: KeyPath, kind: Kind, spelled: Spelled) -> ComponentConfig | None:
        """Return the config object of a component that is spelled out; None if it is not valid."""
        if not isinstance(spelled, dict):
            return spelled
        keys = {key: value for key, value in spelled.items() if key != "_type"}
        type_path, name = (*path, "_type"), spelled.get("_type")
        if name is None:
            close = nearest("_type", map(str, keys))
            hint = f"; '{close}' is written '_type'" if close else ""
            self._problems.add_missing(type_path, hint + alternatives("", registry.names(kind)))
            return None
        if not isinstance(name, str):
            self._problems.add(type_path, f"expected the name of a {KINDS[kind].noun} type, found {name}")
            return None
        try:
            config_type = registry.lookup(kind, name).config_type
        except RequestError as error:
            hint = ". A Python function is written module:name" if kind in FUNCTION_TYPES else ""
            self._problems.add(path, f"{error}{hint}", at=type_path)
            return None
        # Relative paths become absolute if the file exists. Other text is kept, since it may name a model.
        for key, field in config_type.model_fields.items():
            takes_path = any(arm.holds(Path) for arm in KeyType(field.annotation).arms())
            if takes_path and isinstance(keys.get(key), str | Path):
                files = [folder / Path(keys[key]).expanduser() for folder in self._folders]
                keys[key] = next((str(file.absolute()) for file in files if file.exists()), keys[key])
        self._problems.add_silent_errors(config_type, keys, prefix=path)
        try:
            return config_type.model_validate(keys)
        except ValidationError as error:
            self._problems.add_validation(error, config_type, keys, prefix=path)
            return None


def spell_out(kind: Kind, value: Any) -> dict[str, Any]:
    """Return a component as a mapping whose `_type` is a registered name, if there is one. Imports the
    objects of import paths. Raises RequestError for a value that cannot be a component."""
    if not isinstance(value, str | dict):
        raise RequestError(f"expected a mapping with `_type`, or the type alone, found {show_value(value)}")
    keys = dict(value) if isinstance(value, dict) else {"_type": value}
    written = keys.get("_type")
    if written is None and kind in FUNCTION_TYPES and "function" in keys:
        written = keys["_type"] = FUNCTION_TYPES[kind]
    elif written is None and kind == "datasets" and isinstance(keys.get("file_path"), str):
        return keys | {"_type": _file_type(keys["file_path"])}
    if isinstance(written, str) and is_import_path(written):
        registration = registry.find_registration(kind, import_object(written))
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
    if suffix not in FILE_TYPES:
        allowed = ", ".join(FILE_TYPES)
        raise RequestError(f"the suffix of '{file}' does not tell its format. Allowed: {allowed}")
    return FILE_TYPES[suffix]


ACTIONS: tuple[str, ...] = get_args(Action)


def alarms_by_default() -> dict[str, type[AlarmConfig]]:
    """Return the types of alarms that are on if the config does not name them, by name."""
    types = {name: registry.lookup("alarms", name).config_type for name in registry.names("alarms")}
    return {name: kind for name, kind in types.items() if issubclass(kind, AlarmConfig) and kind.by_default}


def spell_out_alarms(data: dict[str, Any], problems: Problems) -> None:
    """Rewrite the alarms of `data` as components with a `_type`, and add a problem for each invalid one."""
    [section] = KINDS["alarms"].places
    entries = value_at(data, section)
    if entries in (False, "off"):  # YAML 1.1 reads `off` as false.
        entries = dict.fromkeys(alarms_by_default(), "off")
        replace_at(data, section, entries)
    for name, value in entries.items() if isinstance(entries, dict) else ():
        value = "off" if value is False else value
        if isinstance(value, str) and not is_import_path(value):
            if value not in ACTIONS:
                hint = "; or a mapping with its thresholds"
                text = f"'{value}' is not an action of an alarm{alternatives(value, ACTIONS)}{hint}"
                problems.add((*section, name), text)
            value = {"_type": name, **({"action": value} if value in ACTIONS else {})}
        elif isinstance(value, dict):
            kind = value.get("_type")
            # An override of a threshold turns an action written alone into the `_type`.
            action = {"action": kind} if kind in ACTIONS else {}
            value = {**action, **value, "_type": name if kind is None or action else kind}
        entries[name] = value

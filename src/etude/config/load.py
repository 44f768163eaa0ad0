"""Loads a file into a validated config, and writes a config back as text without its secrets."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, get_args

from pydantic import SecretBytes, SecretStr, ValidationError

from etude.config import registry
from etude.config.component import AlarmConfig, ComponentConfig, Entries, Supplies, WorkflowConfig
from etude.config.document import (
    REFERENCE,
    Document,
    KeyPath,
    Override,
    apply_overrides,
    dump,
    holds,
    interpolate,
    join_path,
    parse_document,
    read_document,
    replace_at,
    scalars,
    set_at,
    strings,
    value_at,
)
from etude.config.finetuning import SHIPPED
from etude.config.import_path import import_object, is_import_path, make_importable
from etude.config.key_types import KeyType, Problems, walk
from etude.config.registry import DATASET, KINDS, OTHER_DATASETS, VALIDATION, Kind
from etude.config.schema import SECTION_OF, Config
from etude.core.errors import ConfigError, EtudeError, RequestError, alternatives, nearest
from etude.core.history import Action
from etude.core.secrets import MASK, holds_secret, keep_secret, mask_secrets, secrets_in_address

_DEFAULTS = {SECTION_OF[key]: {name: {"_type": name}} for key, name in SHIPPED.items()}
"""The components that need not be written."""

Spelled: TypeAlias = dict[str, Any] | ComponentConfig | None


def load_config(
    path: Path | str, overrides: Iterable[str | Override] = (), *, text: str | None = None
) -> Config:
    """Read a YAML config, or its `text`, apply overrides, and validate all of it.

    Imports the functions that it names. For that, the file's folder and the current one are put first on
    `sys.path`. Files that it names are looked for in the file's folder, then in the current one. Raises
    ConfigError with a line for each problem.
    """
    path = Path(path)
    return _validate(read_document(path) if text is None else parse_document(text, path), overrides)


def parse_config(data: Mapping[str, Any], overrides: Iterable[str | Override] = ()) -> Config:
    """Like `load_config`, for a mapping with the content of a file. Its components may be config objects."""
    return _validate(Document(dict(data)), overrides)


def _validate(document: Document, overrides: Iterable[str | Override]) -> Config:
    registry.load_entry_points()
    document = apply_overrides(replace(document, data=_DEFAULTS | document.data), overrides)
    if isinstance(document.data.get("report"), str | dict | ComponentConfig):
        document.data["report"] = [document.data["report"]]
    data, problems, in_training = document.data, Problems(document), Problems(document)
    # Of two keys for the examples, the one that is not the file's counts.
    other = OTHER_DATASETS[0]
    if document.overrides(DATASET) and not document.overrides(other) and value_at(data, other) is not None:
        replace_at(data, other, None)
    written = value_at(data, ("finetuning", "run_configuration", "config_file"))
    config_file = written or (document.path and str(document.path.absolute()))
    folders = (Path(config_file).parent if isinstance(config_file, str) else Path.cwd(), Path.cwd())
    make_importable(*folders)
    for _, secret in secrets_in(data):
        if not REFERENCE.search(secret):
            _keep(secret)
    _read_environment(data, problems, Path(config_file) if isinstance(config_file, str) else None)
    supplies = _build_components(data, problems, folders)
    problems.add_silent_errors(Config, data)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        problems.add_validation(error, Config, data)
    problems.raise_if_any()
    config._supplies = supplies
    config.complete_names(problems, in_training)
    _find_transcripts(config, folders, in_training)
    for path, slot, value in walk(config, KeyType(Config)):
        if isinstance(value, float) and not math.isfinite(value) and value != slot.default:
            problems.add(path, f"expected a finite number, found {value}")
    problems.raise_if_any()
    config.finetuning.run_configuration.config_file = Path(config_file) if config_file else None
    config._as_written.update(problems.references)
    for secret in find_secrets(config, config.model_dump(mode="json", fallback=str)).values():
        _keep(secret)
    config._untrainable = in_training.error()
    return config


def _find_transcripts(config: Config, folders: Iterable[Path], problems: Problems) -> None:
    """Make the paths of transcripts absolute, and add problems for missing functions and files."""
    block = config.finetuning
    holders: dict[KeyPath, Any] = {("finetuning",): block}
    holders |= {("finetuning", "targets", name): target for name, target in block.targets.items()}
    for path, holder in holders.items():
        if (warm_up := holder.warm_up) is None:
            continue
        source = warm_up.transcripts
        files = [folder / Path(source).expanduser() for folder in folders]
        existing = next((file for file in files if file.is_file()), None)
        try:
            if is_import_path(source):
                import_object(source)
            elif existing is None:
                raise RequestError(f"there is no file '{source}'. A function is written module:name")
            else:
                warm_up.transcripts = str(existing.absolute())
        except RequestError as error:
            problems.add((*path, "warm_up", "transcripts"), str(error))


def _read_environment(data: dict[str, Any], problems: Problems, source: Path | None) -> None:
    """Replace references by values of the environment, and masks by the secrets in `source`."""
    secrets: dict[str, Any] = {}
    if source is not None and any(text == MASK for _, text in strings(data)):
        with suppress(ConfigError):  # The file that a run was started from may be gone or damaged.
            secrets = read_document(source).data
    for path, text in list(strings(data)):
        if text == MASK:
            text = str(value_at(secrets, path) or MASK)
            replace_at(data, path, text)
        if text == MASK:
            problems.add(path, f"run folders do not keep secrets; set it again: -o {join_path(path)}=…")
        try:
            value = interpolate(text, os.environ)
        except ValueError as error:
            problems.add(path, str(error))
        else:
            if value != text:
                problems.references[path] = text
                replace_at(data, path, value)


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
            spelled = registry.spell_out(kind, value)
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
            hint = ". A Python function is written module:name" if kind in registry.FUNCTION_TYPES else ""
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


def _build_components(data: dict[str, Any], problems: Problems, folders: Sequence[Path]) -> Supplies:
    """Replace the components in `data` by config objects. Return the supplies of a workflow with the rewards.

    An invalid component is a problem, and an empty config of its kind. Files are looked for in `folders`.
    """
    _spell_out_alarms(data, problems)
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
            return _add_supplies(data, workflow.supplies(), assembly)
        except EtudeError as error:
            problems.add(("workflow",), str(error))
    return Supplies()


def _add_supplies(data: dict[str, Any], supplies: Supplies, assembly: _Assembly) -> Supplies:
    """Add a workflow's supplies to `data` where it names nothing. Return those whose evaluators are used."""
    written, rewards = dict[KeyPath, tuple[Kind, Entries]](), Supplies()
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
        rewards = supplies
    for path, (kind, spelled) in written.items():
        if (component := assembly.validate(path, kind, dict(spelled))) is not None:
            with suppress(RequestError):  # A given object has its own.
                set_at(data, Override(path, component))
    return rewards


def _with_columns(spelled: dict[str, Any], first: Spelled) -> dict[str, Any]:
    """Copy the first file's column settings to a second file of examples, unless it has its own."""
    if "file_path" not in spelled or first is None:
        return spelled
    known = first.model_dump(exclude_unset=True) if isinstance(first, ComponentConfig) else first
    return {key: known[key] for key in ("id_key", "inputs", "expected") if key in known} | spelled


def alarms_by_default() -> dict[str, type[AlarmConfig]]:
    """Return the types of alarms that are on if the config does not name them, by name."""
    types = {name: registry.lookup("alarms", name).config_type for name in registry.names("alarms")}
    return {name: kind for name, kind in types.items() if issubclass(kind, AlarmConfig) and kind.by_default}


def _spell_out_alarms(data: dict[str, Any], problems: Problems) -> None:
    """Rewrite the alarms of `data` as components with a `_type`, and add a problem for each invalid one.

    `reward_collapse: stop` is `{_type: reward_collapse, action: stop}`. `{above: 3}` under an alarm's name
    has this name as its type. `alarms: off` turns all alarms off.
    """
    [section], actions = KINDS["alarms"].places, get_args(Action)
    entries = value_at(data, section)
    if entries in (False, "off"):  # YAML 1.1 reads `off` as false.
        entries = dict.fromkeys(alarms_by_default(), "off")
        replace_at(data, section, entries)
    for name, value in entries.items() if isinstance(entries, dict) else ():
        value = "off" if value is False else value
        if isinstance(value, str) and not is_import_path(value):
            if value not in actions:
                hint = "; or a mapping with its thresholds"
                text = f"'{value}' is not an action of an alarm{alternatives(value, actions)}{hint}"
                problems.add((*section, name), text)
            value = {"_type": name, **({"action": value} if value in actions else {})}
        elif isinstance(value, dict):
            kind = value.get("_type")
            # An override of a threshold turns an action written alone into the `_type`.
            action = {"action": kind} if kind in actions else {}
            value = {**action, **value, "_type": name if kind is None or action else kind}
        entries[name] = value


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


def resolved_yaml(config: Config) -> str:
    """Return the whole config as YAML that loads again, with every default and without secrets.

    Values from the environment are written as their references. Other secrets are written as `MASK`, except a
    default that anybody can read in the reference documentation.
    """
    data = config.model_dump(mode="json", fallback=str)
    secrets = find_secrets(config, data)
    components = dict(components_in(data))
    for path, slot, value in walk(config, KeyType(Config)):
        if path in components and isinstance(value, ComponentConfig):
            replace_at(data, path, {"_type": value.type_name, **value_at(data, path)})
        elif isinstance(value, Declared) and value == slot.default and value_at(data, path) == MASK:
            replace_at(data, path, value.get_secret_value())
    for path in secrets:
        replace_at(data, path, MASK)
    for path, text in config._as_written.items():
        # A default of a secret is also a secret.
        has_default = any((match["default"] or "").removeprefix(":-") for match in REFERENCE.finditer(text))
        is_secret = path in secrets and has_default
        if value_at(data, path) is not None:
            replace_at(data, path, MASK if is_secret or mask_secrets(text) != text else text)
    return dump(data)


Declared = SecretStr | SecretBytes
"""The classes of values that are declared as secret."""


def secrets_in(data: Any, *, sure: bool = False) -> Iterator[tuple[KeyPath, str]]:
    """Yield the texts and whole numbers that are secret by their names and forms, with their paths, as in
    `holds_secret`."""
    for path, value in scalars(data):
        name, text = next((key for key in reversed(path) if isinstance(key, str)), ""), str(value)
        if type(value) in (str, int) and holds_secret(name, text, sure=sure):
            yield path, text


def find_secrets(config: Config, data: Any, *, sure: bool = False) -> dict[KeyPath, str]:
    """Return all secrets of a config by path, without defaults and, if `sure`, without uncertain ones; `data`
    is the config as JSON."""
    slots = {path: (slot, value) for path, slot, value in walk(config, KeyType(Config))}
    declared = {
        path: plain.decode(errors="replace") if isinstance(plain, bytes) else plain
        for path, (slot, value) in slots.items()
        if isinstance(value, Declared) and value != slot.default and (plain := value.get_secret_value())
    }
    looking = {
        path: text
        for path, text in secrets_in(data, sure=sure)
        if path not in slots or (slots[path][0].default != text and not isinstance(slots[path][1], Declared))
    }
    return looking | declared


def _keep(text: str) -> None:
    """Mask a secret from now on; for an address, mask only the secrets in it."""
    keep_secret(*secrets_in_address(text) if "://" in text else (text,))

"""Loads a file into a validated config, and writes a config back as text without its secrets."""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import SecretBytes, SecretStr, ValidationError

from etude.config import registry
from etude.config.assemble import build_components, components_in
from etude.config.component import ComponentConfig
from etude.config.document import (
    Document,
    KeyPath,
    Override,
    apply_overrides,
    dump,
    join_path,
    parse_document,
    read_document,
    replace_at,
    strings,
    value_at,
)
from etude.config.finetuning import SHIPPED
from etude.config.import_path import import_object, is_import_path, make_importable
from etude.config.key_types import KeyType, Problems, walk
from etude.config.registry import DATASET, OTHER_DATASETS
from etude.config.schema import SECTION_OF, Config
from etude.core.errors import ConfigError, RequestError, nearest
from etude.core.secrets import MASK, holds_secret, keep_secret, mask_secrets, secrets_in_address

_REFERENCE = re.compile(
    r"\$(?:(?P<dollar>\$)|\{(?P<name>[A-Za-z_]\w*)(?P<default>:-(?:\$(?!\{)|[^}$])*)?\}|(?P<broken>\{))"
)
"""`${NAME}` and `${NAME:-default}`; `$$` is one dollar sign. A default holds no reference."""

_DEFAULTS = {SECTION_OF[key]: {name: {"_type": name}} for key, name in SHIPPED.items()}
"""The components that need not be written."""


def interpolate(text: str, environ: Mapping[str, str]) -> str:
    """Replace the references in `text`. As in a shell, a default also replaces an empty value.

    Raises ValueError, which names the variable, if one without a default is not set, and for another `${`.
    """

    def value(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        if match["broken"]:
            raise ValueError("'${' must begin ${NAME} or ${NAME:-default}; write $${ for the text itself")
        name, default = match["name"], match["default"]
        if default is not None:
            return environ.get(name) or default.removeprefix(":-")
        if name not in environ:
            close = nearest(name, environ)
            hint = f"; did you mean '{close}'?" if close else "."
            raise ValueError(
                f"the environment variable '{name}' is not set{hint} "
                f"Set it, or give a default: ${{{name}:-default}}"
            )
        return environ[name]

    return _REFERENCE.sub(value, text)


def required_variables(text: str) -> list[str]:
    """Return the variables in a text's references that have no default."""
    return [match["name"] for match in _REFERENCE.finditer(text) if match["name"] and not match["default"]]


def portable_references(text: str, environ: Mapping[str, str], otherwise: str | None) -> str:
    """Rewrite references, so that they mean the same in another process as with this environment.

    A default that is used here is written out, and one that is not is left out. `otherwise` replaces
    variables that are missing there; None makes that an error.
    """

    def rewrite(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if not name:
            return match[0]
        if default is not None and not environ.get(name):
            return default.removeprefix(":-").replace("$", "$$")
        return f"${{{name}}}" if otherwise is None else f"${{{name}:-{otherwise}}}"

    return _REFERENCE.sub(rewrite, text)


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
        has_default = any((match["default"] or "").removeprefix(":-") for match in _REFERENCE.finditer(text))
        is_secret = path in secrets and has_default
        if value_at(data, path) is not None:
            replace_at(data, path, MASK if is_secret or mask_secrets(text) != text else text)
    return dump(data)


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
        if not _REFERENCE.search(secret):
            _keep(secret)
    _read_environment(data, problems, Path(config_file) if isinstance(config_file, str) else None)
    build_components(data, problems, folders)
    problems.add_silent_errors(Config, data)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        problems.add_validation(error, Config, data)
    problems.raise_if_any()
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


Declared = SecretStr | SecretBytes
"""The classes of values that are declared as secret."""


def secrets_in(data: Any, *, sure: bool = False) -> Iterator[tuple[KeyPath, str]]:
    """Yield the texts that are secret by their names and forms, with their paths, as in `holds_secret`."""
    for path, text in strings(data):
        name = next((key for key in reversed(path) if isinstance(key, str)), "")
        if holds_secret(name, text, sure=sure):
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

"""A config that can be shown to others: without the places of the machine that it was used on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from etude.config.document import dig, strings

_CONFIG_FILE = ("finetuning", "run_configuration", "config_file")


def without_places(data: dict[str, Any], run: Path) -> dict[str, Any]:
    """The content of a stored config with absolute paths cut down.

    A path within the project is as one would write it there, any other is only its name. Folders of this
    machine are taken out of longer texts too.
    """
    file = dig(data, _CONFIG_FILE)
    project = [str(Path(file).parent)] if isinstance(file, str) else []
    folders = [*project, str(run), str(run.parent), str(Path.cwd()), str(Path.home())]
    folders += [text for _, text in strings(data) if _is_absolute(text)]
    # The longest first, or a folder would be taken for the one that it lies in.
    known = sorted({folder for folder in folders if len(folder) > 1}, key=lambda folder: -len(folder))
    return dict(_mapped(data, lambda text: _shortened(text, project, known)))


def _shortened(text: str, project: Sequence[str], known: Sequence[str]) -> str:
    if _is_absolute(text):
        for folder in project:
            if PurePosixPath(text).is_relative_to(folder):
                return str(PurePosixPath(text).relative_to(folder))
        return PureWindowsPath(text).name if "\\" in text else PurePosixPath(text).name
    for folder in known:
        text = text.replace(folder, PurePosixPath(folder).name)
    return text


def _is_absolute(text: str) -> bool:
    return "\n" not in text and (PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute())


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return change(value) if isinstance(value, str) else value

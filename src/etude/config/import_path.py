"""Import paths: `package.module:name` names a Python object in a config. Also who owns a module or a file."""

import importlib
import inspect
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import PathFinder
from operator import attrgetter
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError, RequestError, first_error, nearest, safe_error_text
from etude.core.secrets import mask_secrets

_IMPORT_PATH = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")

_INSTALLED = ("/site-packages/", "/dist-packages/", "\\site-packages\\", "\\dist-packages\\")
_ETUDE = str(Path(__file__).parents[1])
_PYTHON = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_GIVEN = ("example", "output", "episode")
"""The arguments that agents and evaluators are called with."""


class _Importing(threading.local):
    """The import that a thread is in."""

    module: str | None = None
    """The module that an import path names, while it is imported."""


importing = _Importing()

_packages: set[str] = set()

_folders: tuple[str, ...] = ()
"""The folders of the config in use, which come first on `sys.path`."""


def note_user_module(module: str) -> None:
    """Record that a config, or an installed plug-in, brings this module. Its package counts as the user's."""
    _packages.add(module.partition(".")[0])


def is_user_module(module: str) -> bool:
    """Return whether a config or a plug-in brought a module's package."""
    return module.partition(".")[0] in _packages


def class_path(kind: type) -> str:
    """Return the import path of a class: `module:Name`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def is_installed(file: str) -> bool:
    """Return whether a file came with Python or was installed as a package."""
    return file.startswith((*_PYTHON, "<frozen")) or any(part in file for part in _INSTALLED)


def is_import_path(text: str) -> bool:
    """Return whether `text` has the form `package.module:name`."""
    return _IMPORT_PATH.fullmatch(text) is not None


def make_importable(*folders: Path) -> None:
    """Put `folders` first on `sys.path`, like the folder of a script."""
    global _folders
    _folders = tuple(dict.fromkeys(str(folder.resolve()) for folder in folders))
    sys.path[:] = [*_folders, *(entry for entry in sys.path if entry not in _folders)]
    importlib.invalidate_caches()


def import_object(path: str) -> Any:
    """Return the object that an import path names. Raises RequestError if there is no such module or name."""
    match = _IMPORT_PATH.fullmatch(path)
    if match is None:
        raise RequestError(f"'{path}' is not an import path; write package.module:name")
    module_name, name = match["module"], match["name"]
    note_user_module(module_name)
    _forget_namesake(module_name.partition(".")[0])
    before, importing.module = importing.module, module_name
    try:
        module = importlib.import_module(module_name)
    except EtudeError:
        raise
    except (Exception, SystemExit) as error:  # For example argparse at the top of a script.
        parents = {module_name.rsplit(".", depth)[0] for depth in range(module_name.count(".") + 1)}
        reason = where_raised(error)
        if isinstance(error, ModuleNotFoundError) and error.name in parents:
            modules = (file.stem for folder in _folders for file in Path(folder).glob("*.py"))
            close = nearest(str(error.name), modules)
            hint = f"; did you mean '{close}'?" if close else ""
            places = " or ".join((*_folders, "the installed packages"))
            reason = f"there is no module '{error.name}' in {places}{hint}"
        raise RequestError(f"cannot import '{path}': {reason}") from error
    finally:
        importing.module = before
    try:
        return attrgetter(name)(module)
    except AttributeError:
        close = nearest(name, (known for known in vars(module) if not known.startswith("_")))
        hint = f"; did you mean '{module_name}:{close}'?" if close else ""
        where = getattr(module, "__file__", None) or "built into Python"
        raise RequestError(f"module '{module_name}' ({where}) has no '{name}'{hint}") from None


def where_raised(error: BaseException) -> str:
    """Return `file:line: Type: message` on one line, secrets masked. The place is the last line of user code
    in the traceback. An exception group is told by the first error inside."""
    from pydantic_core import ValidationError  # Imported here because `etude --help` does not need them.

    from etude.core.data_model import list_faults

    frame, error = user_frame(error), first_error(error)
    text = next(iter(safe_error_text(error).splitlines()), "no message")
    if isinstance(error, ValidationError):
        text = f"{error.title}: {list_faults(error)}"
    summary = f"{type(error).__name__}: {mask_secrets(text)}"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {summary}"
    return summary if frame is None else f"{frame.filename}:{frame.lineno}: {summary}"


@contextmanager
def user_code(kind: type[EtudeError], text: str) -> Iterator[None]:
    """Raise an error of this kind for one of a user's code in the block; Etude's own errors pass through."""
    try:
        yield
    except EtudeError:
        raise
    except (Exception, SystemExit) as error:
        raise kind(f"{text}: {where_raised(error)}") from error


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of user code in a traceback, also of an exception group. Without any, it is
    the innermost of all, or None for Etude's own error."""
    frames = [*traceback.extract_tb(error.__traceback__)]
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
        frames += traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if not frame.filename.startswith("<")]
    user_frames = [frame for frame in frames if not frame.filename.startswith(_ETUDE)]
    user_frames = [frame for frame in user_frames if not is_installed(frame.filename)]
    return next(reversed(user_frames or ([] if isinstance(error, EtudeError) else frames)), None)


def order_by_name(signature: inspect.Signature, names: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of these names in the order in which a function takes them, if its first
    parameters have all these names. Raises TypeError if only some are in another place."""
    order = [each.name for each in signature.parameters.values() if each.kind in _POSITIONAL][: len(names)]
    if sorted(order) == sorted(names):
        return tuple(order)
    for name, place in zip(order, names, strict=False):
        if name in _GIVEN and name != place:
            raise TypeError(f"its parameter '{name}' is in the place of '{place}'")
    return tuple(names)


def where_defined(function: Any) -> str:
    """Return `file:line` where a function begins, or a class or an object's class; else its `repr`."""
    while isinstance(function, partial):
        function = function.func
    for candidate in (function, getattr(type(function), "__call__", None)):  # noqa: B004  its code
        code = getattr(inspect.unwrap(candidate), "__code__", None) if callable(candidate) else None
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
    return repr(function)


def _forget_namesake(module: str) -> None:
    """Unload a module if another file of its name now comes first, as when a second config is loaded."""
    loaded = getattr(sys.modules.get(module), "__file__", None)
    spec = PathFinder.find_spec(module, list(_folders)) if loaded else None
    if spec is None or spec.origin is None or Path(spec.origin) == Path(str(loaded)):
        return
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        del sys.modules[name]

"""Names of what the server keeps. They name folders, so they are made here and never taken from outside."""

from __future__ import annotations

import re
import secrets

from etude.server.errors import ApiError

_ID = re.compile(r"(file|ftjob)-[0-9a-f]{24}")
_SUFFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def new_id(kind: str) -> str:
    """A new name: `file-…`, `ftjob-…`, `ftevent-…`."""
    return f"{kind}-{secrets.token_hex(12)}"


def is_id(text: str) -> bool:
    """Whether a file or a job could have this name."""
    return _ID.fullmatch(text) is not None


def check_suffix(suffix: str) -> str:
    """The suffix of a model's name. Raises ValueError for one that would not be part of a name."""
    if not _SUFFIX.fullmatch(suffix):
        raise ValueError("1 to 64 letters, digits, '-' and '_', the first a letter or a digit")
    return suffix


def model_name(base: str, suffix: str | None, job: str, step: int | None = None) -> str:
    """`ft:<base>:<suffix>:<id>`, and `:ckpt-step-<n>` behind it for a checkpoint."""
    root = base.split(":")[1] if base.startswith("ft:") else base
    name = f"ft:{root}:{suffix or ''}:{job.removeprefix('ftjob-')[:12]}"
    return name if step is None else f"{name}:ckpt-step-{step}"


def not_found(kind: str, name: str, *, param: str, code: str) -> ApiError:
    """The answer about something that is not there."""
    return ApiError(404, f"there is no {kind} {name!r}", param=param, code=code)

"""The purposes of model calls: an agent's episode, a judgement, a lesson of a teacher."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["agent", "user", "judge", "teacher", "opponent", "other"]

_EPOCH = re.compile(r"(warm-up|train|validation)/\d+")


@dataclass(frozen=True, slots=True)
class Purpose:
    """Who asks a model, and in which part of a run."""

    role: Role = "other"
    phase: str = ""
    """`train/3`, `validation/5`, `eval`; empty outside of episodes."""


_OTHER = Purpose()
_PURPOSE: ContextVar[Purpose] = ContextVar("purpose", default=_OTHER)


@contextmanager
def asking_for(role: Role, episode_id: str) -> Iterator[None]:
    """Have the calls within the block count for a role, and for the part of the run that has the episode."""
    match = _EPOCH.match(episode_id)
    phase = episode_id.partition("/")[0] if match is None else match[0]
    with restored(Purpose(role, phase)):
        yield


@contextmanager
def restored(purpose: Purpose) -> Iterator[None]:
    """The same for a purpose that another process has told."""
    token = _PURPOSE.set(purpose)
    try:
        yield
    finally:
        _PURPOSE.reset(token)


def current_purpose() -> Purpose:
    """The purpose of a call that is made now."""
    return _PURPOSE.get()

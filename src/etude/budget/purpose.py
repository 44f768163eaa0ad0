"""The purposes of model calls: an agent's episode, a judgement, a lesson of a teacher."""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from etude.core.within import Within

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


def asking_for(role: Role, episode_id: str) -> Within[Purpose]:
    """Have the calls within the block count for a role, and for the part of the run that has the episode."""
    return Within(_PURPOSE, _purpose(role, episode_id))


def restored(purpose: Purpose) -> Within[Purpose]:
    """The same for a purpose that another process has told."""
    return Within(_PURPOSE, purpose)


@lru_cache(maxsize=1024)
def _purpose(role: Role, episode_id: str) -> Purpose:
    match = _EPOCH.match(episode_id)
    return Purpose(role, episode_id.partition("/")[0] if match is None else match[0])


def current_purpose() -> Purpose:
    """The purpose of a call that is made now."""
    return _PURPOSE.get()

"""How a run of untrusted code ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["ok", "wrong", "error", "timeout", "memory", "refused"]
"""`ok`: ran to its end (and gave what was expected); `wrong`: ran, and gave something else; `error`:
raised, crashed, exited with a status or wrote too much; `timeout`: took too long; `memory`: asked for
more memory than allowed; `refused`: tried what the sandbox forbids."""

Guard: TypeAlias = Literal["seccomp", "namespace", "landlock", "audit hook"]

AUDIT_HOOK: Guard = "audit hook"


@dataclass(frozen=True, slots=True)
class Isolation:
    """What kept the program from the network, from files, and from other processes.

    An `audit hook` stops code that means no harm. Code that is made to break out of it can.
    """

    network: Guard = AUDIT_HOOK
    files: Guard = AUDIT_HOOK
    processes: Guard = AUDIT_HOOK

    @property
    def by_kernel(self) -> bool:
        """Whether the kernel enforces all of it."""
        return AUDIT_HOOK not in (self.network, self.files, self.processes)


@dataclass(frozen=True, slots=True)
class Returned:
    """What one call of a function gave: a value, or else why there is none."""

    value: Any = None
    """As JSON keeps it: a tuple comes as a list."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """One run of a program."""

    status: Status
    reason: str = ""
    """One sentence for a person; empty when the status is `ok`."""
    output: str = ""
    """Standard output, up to the bound."""
    returned: tuple[Returned, ...] = ()
    """Of `call_function`: the calls that came to an end, in their order."""
    seconds: float = 0.0
    """Wall time."""
    isolation: Isolation = field(default_factory=Isolation)

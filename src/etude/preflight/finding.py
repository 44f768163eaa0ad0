"""Findings: things that were looked at, each with its status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from etude.core.errors import EtudeError

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    status: Status
    detail: str


@dataclass
class Findings:
    """All of them, in the order in which they were looked at."""

    items: list[Finding] = field(default_factory=list)

    def ok(self, what: str, detail: str) -> None:
        """Nothing is wrong with it."""
        self.items.append(Finding(what, "ok", detail))

    def warn(self, what: str, detail: str) -> None:
        """It works, and may not be what was meant."""
        self.items.append(Finding(what, "warning", detail))

    def fail(self, what: str, error: EtudeError | str) -> None:
        """It does not work."""
        self.items.append(Finding(what, "error", str(error)))

    @contextmanager
    def of_errors(self, what: str) -> Iterator[None]:
        """An EtudeError within does not raise, and is a finding about `what`."""
        try:
            yield
        except EtudeError as error:
            self.fail(what, error)

    def of(self, status: Status) -> list[Finding]:
        """Those of one status."""
        return [finding for finding in self.items if finding.status == status]

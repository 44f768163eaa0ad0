"""Findings: the results of checks, each with a status."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from etude.core.errors import EtudeError


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str
    status: Literal["ok", "warning", "error"]
    detail: str


@dataclass
class Findings:
    """All findings, in the order of the checks."""

    items: list[Finding] = field(default_factory=list)

    def ok(self, what: str, detail: str) -> None:
        """Add a finding that nothing is wrong."""
        self.items.append(Finding(what, "ok", detail))

    def warn(self, what: str, detail: str) -> None:
        """Add a finding that something works, but may not be intended."""
        self.items.append(Finding(what, "warning", detail))

    def fail(self, what: str, error: EtudeError | str) -> None:
        """Add a finding that something does not work."""
        self.items.append(Finding(what, "error", str(error)))

    @contextmanager
    def catch_errors(self, what: str) -> Iterator[None]:
        """Turn an EtudeError in the block into a finding about `what`."""
        try:
            yield
        except EtudeError as error:
            self.fail(what, error)

    @property
    def has_errors(self) -> bool:
        """Whether something does not work; there may be warnings."""
        return any(finding.status == "error" for finding in self.items)

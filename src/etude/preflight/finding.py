"""Findings: things that were looked at, each with its status."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from etude.core.errors import EtudeError

Status = Literal["ok", "warning", "error"]


class Finding(BaseModel):
    """One thing that was looked at."""

    model_config = ConfigDict(frozen=True)

    what: str
    status: Status
    detail: str


class Findings(BaseModel):
    """All of them, in the order in which they were looked at."""

    items: list[Finding] = Field(default_factory=list)

    def ok(self, what: str, detail: str) -> None:
        """Nothing is wrong with it."""
        self.items.append(Finding(what=what, status="ok", detail=detail))

    def warn(self, what: str, detail: str) -> None:
        """It works, and may not be what was meant."""
        self.items.append(Finding(what=what, status="warning", detail=detail))

    def fail(self, what: str, error: EtudeError | str) -> None:
        """It does not work."""
        self.items.append(Finding(what=what, status="error", detail=str(error)))

    def of(self, status: Status) -> list[Finding]:
        """Those of one status."""
        return [finding for finding in self.items if finding.status == status]

    def as_json(self) -> list[dict[str, Any]]:
        """As JSON."""
        return [finding.model_dump(mode="json") for finding in self.items]

"""Printing what was looked at, and how it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from etude.cli.console import emit, say_wrapped

if TYPE_CHECKING:
    from etude.preflight.finding import Findings

MARKS = {"ok": "✓", "warning": "!", "error": "✗"}
"""Before each finding."""


def show_findings(findings: Findings, facts: dict[str, Any], as_json: bool) -> None:
    """Findings as lines; or with other facts as a JSON object."""
    if as_json:
        emit({**facts, "findings": asdict(findings)["items"]})
        return
    for finding in findings.items:
        say_wrapped(f"{MARKS[finding.status]} {finding.what}: {finding.detail}")

"""`etude doctor`: the whole loop on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.preflight import doctor as trial
from etude.preflight.finding import Findings


@pytest.mark.slow
def test_the_loop_works_here():
    findings = Findings()
    trial.try_loop(findings)
    assert [(each.what, each.status) for each in findings.items] == [
        ("loop: collect", "ok"),
        ("loop: train", "ok"),
        ("loop: kill and resume", "ok"),
        ("loop", "ok"),
    ]


@pytest.mark.slow
def test_a_loop_that_breaks_says_what_the_run_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(trial, "_AGENT", "raise OSError('no such device')")
    findings = Findings()
    trial.try_loop(findings)
    (finding,) = findings.items
    assert finding.status == "error" and "no such device" in finding.detail
    assert "etude-doctor-" in finding.detail

"""`etude doctor`: the whole loop on a tiny model."""

from __future__ import annotations

import pytest

from etude.preflight import trial
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

"""Threads that wait spin briefly, unless the environment says otherwise."""

from __future__ import annotations

import os

import pytest

from etude.core.spinning import spin_briefly


def test_they_spin_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is set where nothing was said."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "10000"


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A user's own way to wait stays."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    spin_briefly()
    assert dict(os.environ) == before

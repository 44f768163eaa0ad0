"""Runners that are lost while they start, as on a machine that is gone and is not yet missed."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from etude.core.errors import EtudeError
from etude.runners import pool
from etude.runners.process import LocalLauncher, LocalProcess, ProcessEnd
from etude.runners.program import Invitation
from tests.runners.playing import config_with, evaluate, examples
from tests.support import EchoEngine


class LostProcess(LocalProcess):
    """A process whose end is that of its machine."""

    async def ended(self) -> ProcessEnd:
        await super().ended()
        return ProcessEnd("was lost with its machine", is_lost=True)


def lose(monkeypatch: pytest.MonkeyPatch, count: int, only: int | None = None) -> list[int]:
    """The first runners that are started are lost at once, or those of one place; gives the places."""
    launch, started = LocalLauncher.launch, list[int]()

    async def lost_at_first(self: LocalLauncher, invitation: Invitation, place: int) -> LocalProcess:
        if only in (None, place):
            started.append(place)
        process = await launch(self, invitation, place)
        if len(started) > count or only not in (None, place):
            return process
        process.kill()
        return LostProcess(process._process, process._lifeline, process._path)

    monkeypatch.setattr(LocalLauncher, "launch", lost_at_first)
    monkeypatch.setattr(pool, "_PAUSE_SECONDS", 0.01)
    return started


async def test_a_runner_that_is_lost_with_its_machine_is_started_until_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lose(monkeypatch, 5)
    config = config_with(isolation="process", runners=1)
    output = await evaluate(tmp_path / "run", config, EchoEngine(), examples("", ""))
    assert (output.failures, len(output.scores()["length"])) == ({}, 2)


async def test_it_is_not_started_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started = lose(monkeypatch, 10**6)
    each = pool._START_SECONDS / 4
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + each * len(started))
    monkeypatch.setattr(pool, "time", clock)
    config = config_with(isolation="process", runners=1)
    with pytest.raises(EtudeError, match="runner 1 cannot be started: was lost with its machine"):
        await evaluate(tmp_path / "run", config, EchoEngine(), examples(""))
    assert started == [1] * 4

"""Which vLLM tests run against: the stand-in, and by `ETUDE_TEST_VLLM=path pytest -m vllm` the real one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

STAND_IN = (sys.executable, str(Path(__file__).parent / "vllm_stand_in.py"))
REAL = "ETUDE_TEST_VLLM"

QUICKLY = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}
"""The environment in which vLLM starts quickly on two cores."""

commands = pytest.mark.parametrize(
    "command", ["stand-in", pytest.param("real", marks=pytest.mark.vllm)], indirect=True
)
"""For tests that take a `command`."""


def choose_command(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """vLLM's program, with the environment in which it starts quickly on two cores."""
    if name == "stand-in":
        return STAND_IN
    program = os.environ.get(REAL)
    if not program:
        pytest.skip(f"{REAL} does not name a vLLM")
    for variable, value in QUICKLY.items():
        monkeypatch.setenv(variable, value)
    return (program,)


def list_vllms(server: int) -> list[int]:
    """The vLLM processes that a server has started, in that order."""
    children = sorted(psutil.Process(server).children(), key=lambda child: (child.create_time(), child.pid))
    return [child.pid for child in children if "--enable-lora" in child.cmdline()]

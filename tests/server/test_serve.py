"""A server's start, and its queue of jobs in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from etude.cli.app import app
from etude.server.database import open_database
from etude.server.jobs import JobStore
from etude.server.scheduler import Scheduler
from etude.server.settings import server_settings


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["./nowhere"], "the folder does not exist"),
        (["./nowhere", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set or empty"),
        (["./nowhere", "--host", "0.0.0.0"], "there is no API key"),
        (["./nowhere", "--host", "203.0.113.1"], "there is no API key"),
        (["./nowhere", "--dtype", "int3"], "--dtype"),
        (["./nowhere", "--vllm-arg=--enforce-eager"], "there is no vLLM without --engine vllm"),
        (["./nowhere", "--vllm-device", "0"], "there is no vLLM without --engine vllm"),
        (["./nowhere", "--samplers", "2"], "there is no vLLM without --engine vllm"),
        (["./nowhere", "--samplers", "2", "--engine", "vllm"], "name one: --on auto"),
        (["./nowhere", "--on", "auto"], "Jobs train on this machine"),
    ],
)
def test_a_server_that_cannot_be_is_refused_with_what_to_do(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["serve", *arguments, "--port", "0"])
    assert done.exit_code == 2
    assert told in done.stderr


async def test_a_database_that_cannot_be_read_at_the_start_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, looks = JobStore(open_database(tmp_path / "server.db")), []
    looked = asyncio.Event()

    def with_status(status: str) -> list[Any]:
        looks.append(status)
        if len(looks) == 1:
            raise OSError("disk I/O error")
        if status == "queued":
            loop.call_soon_threadsafe(looked.set)
        return []

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(jobs, "with_status", with_status)
    pool: Any = None  # Asked only where the engine is put away for jobs.
    scheduler = Scheduler(server_settings(model="m", name="m", data_dir=tmp_path), jobs, pool)
    scheduler.start()
    async with asyncio.timeout(60):
        await looked.wait()
    await scheduler.stop()
    assert looks[:3] == ["running", "running", "queued"]

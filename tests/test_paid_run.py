"""A run that pays an API is killed at any operation: nothing is lost or paid twice, and its end is the same.

One model is trained here and one by jobs at a stand-in for the API, which outlives the run.
"""

import hashlib
import json
import os
import shutil
import sqlite3
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from etude.models.tiny import build_policy, build_tokenizer
from etude.store.database import Writer
from etude.store.journal import Journal
from tests.backends.openai_stand_in import BASE, KEY, StandIn
from tests.cli.killed import everything, repeatable_project
from tests.cli.projects import change, rows
from tests.file_operations import die_at, is_killed, operations_log
from tests.support import without_times

AGENT = '''
import etude


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> str:
    question = [{"role": "user", "content": example.inputs["question"]}]
    hint = await episode.chat(question, model="helper")
    reply = await episode.chat([*question, {"role": "user", "content": hint.text}], model="policy")
    return reply.text


@etude.evaluator
def vary(example: etude.Example, output: str) -> float:
    """The share of different letters: even a model that has learnt nothing gets some."""
    return len(set(output)) / 8
'''
TRAIN = ("train", "config.yml", "--name", "run")
EVERY = 40
"""Operations from one kill to the next."""


class PaidApi(StandIn):
    """Its answers follow from requests alone, so that every run gets the same."""

    def __init__(self, journal: Path) -> None:
        super().__init__(min_rows=2)
        self.journal = journal
        self.doubled: list[int] = []
        """The seeds of requests whose answers the journal had when they came."""

    def clear(self) -> None:
        """Forget all files, jobs and requests."""
        for made in (self.files, self.contents, self.jobs, self.doubled):
            made.clear()

    def _complete(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.read())
        if is_answered(self.journal, body["seed"]):
            self.doubled.append(body["seed"])
        said = hashlib.sha256(json.dumps([body["model"], body["messages"], body["seed"]]).encode())
        reply = super()._complete(request).json() | {"id": "chatcmpl-paid", "created": 0}
        reply["choices"][0]["message"]["content"] = f"{int(said.hexdigest()[:8], 16) % 1000}"
        return httpx.Response(200, json=reply)


def is_answered(journal: Path, seed: int) -> bool:
    """Whether a journal has the paid model's answer to a request of this seed."""
    if not journal.exists():
        return False
    try:
        with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=10)) as connection:
            found = connection.execute("SELECT value FROM steps WHERE key LIKE '%/call/%'").fetchall()
    except sqlite3.OperationalError:  # The run is making its tables at this moment.
        return False
    calls = [json.loads(text) for (text,) in found]
    return any(
        call.get("completion") and call["model"] == "helper" and call["key"] >> 32 == seed for call in calls
    )


def log_stored(path: Path) -> None:
    """From now on log what this process's journal is about to store, and then that it has."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    write = Writer._write

    def write_and_log(writer: Any, batch: list[Any]) -> None:
        texts = {each.key: each.text for each in batch if each is not None}
        sums = {key: None if text is None else zlib.crc32(text.encode()) for key, text in texts.items()}
        os.write(file, f"{json.dumps(sums)}\n".encode())
        write(writer, batch)
        os.write(file, b'"done"\n')

    Writer._write = write_and_log  # type: ignore[method-assign]


def lost_entries(log: Path, journal: Path) -> list[str]:
    """The keys that the journal had stored, as the log says, and that do not have those values."""
    allowed: dict[str, set[int | None]] = {}
    batch: dict[str, Any] = {}
    for entry in map(json.loads, log.read_text().splitlines() if log.exists() else ()):
        is_done = entry == "done"
        batch = batch if is_done else entry
        for key, value in batch.items():
            # What was not acknowledged may be there or not.
            allowed[key] = {value} if is_done else allowed.get(key, {None}) | {value}
    if not any(None not in values for values in allowed.values()):
        return []
    with Journal(journal, read_only=True) as opened:
        there = {key: zlib.crc32(json.dumps(value).encode()) for key, value in opened.scan()}
    return [key for key, values in allowed.items() if there.get(key) not in values]


def stored_results(run: Path) -> dict[str, Any]:
    """The steps of a run's journal, and its files: weights by their digests, metrics without times."""
    found: dict[str, Any] = everything(run)
    for path in run.rglob("*"):
        if path.suffix == ".safetensors":
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name == "training_metrics.jsonl":
            found[str(path)] = [without_times(json.loads(line)) for line in path.read_text().splitlines()]
        else:
            found[str(path)] = None
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    base = tmp_path / "base"
    build_policy(build_tokenizer(["t0?", "v0?", "0123456789"], splits=["[0-9]"]), 0).export(base)
    folder = repeatable_project(tmp_path / "project", base)
    (folder / "agent.py").write_text(AGENT)
    (folder / "validation.jsonl").write_text(rows(2, "v"))
    collected = {"num_generations": 2, "examples_per_epoch": 4}
    change(
        folder / "config.yml",
        llms__helper={"_type": "openai", "model_name": BASE, "max_tokens": 8},
        eval__general__max_concurrency=4,
        trajectory_builders__grpo={"_type": "grpo"} | collected,
        trajectory_builders__all={"_type": "expert_iteration"} | collected,
        trainer_adapters__openai={"_type": "openai", "min_rows": 2},
        trainers={"epochs": {"_type": "epochs", "poll_interval": 0.001}},
        finetuning__num_epochs=2,
        finetuning__run_configuration__validation_interval=2,
        finetuning__targets={
            "policy": {"trajectory_builder": "grpo", "trainer_adapter": "local"},
            "helper": {"trajectory_builder": "all", "trainer_adapter": "openai"},
        },
    )
    return folder


@pytest.fixture
def api(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PaidApi]:
    paid = PaidApi(project / "runs" / "run" / "run.db")
    with paid.serve() as url:
        for name, value in {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": url, "OMP_NUM_THREADS": "1"}.items():
            monkeypatch.setenv(name, value)
        yield paid


@pytest.mark.slow
def test_killed_at_any_operation_it_ends_the_same_and_pays_for_nothing_twice(project: Path, api: PaidApi):
    runs, log = project / "runs", project / "stored"

    def killed_at(number: int, *command: str) -> bool:
        return is_killed(runs, number, log, *command, folder=project, module=__name__)

    assert not killed_at(0, *TRAIN)
    expected, jobs = stored_results(runs / "run"), len(api.jobs)
    for number in range(1, operations_log(runs).stat().st_size, EVERY):
        shutil.rmtree(runs)
        log.unlink()
        api.clear()
        if not killed_at(number, *TRAIN):
            return  # It came to fewer operations than the first.
        assert lost_entries(log, api.journal) == []
        is_there = (runs / "run" / "config.yml").exists() and api.journal.exists()
        assert not killed_at(0, *(("resume", "run") if is_there else TRAIN))
        assert stored_results(runs / "run") == expected
        assert (api.doubled, len(api.jobs), len(api.files)) == ([], jobs, jobs)


def main(folder: str, number: str, log: str, *arguments: str) -> None:
    """Run a command that is killed, whose journal copies its log to the database often."""
    import etude.store.run_folder

    connect = sqlite3.connect

    def connect_small(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        connection.execute(
            "PRAGMA wal_autocheckpoint=20"
        )  # SQLite's thousand pages are never in a short run.
        return connection

    die_at(Path(folder), int(number))
    sqlite3.connect, connect = connect_small, sqlite3.connect
    log_stored(Path(log))
    etude.store.run_folder.describe_environment = lambda **_: {}  # Finding it out takes long.
    from etude.cli.app import app

    app(arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])

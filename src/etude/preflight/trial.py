"""The whole loop on a tiny model: a run that is killed half-way, goes on, and ends with other weights."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from etude.config.document import dump
from etude.core.errors import EtudeError
from etude.core.secrets import masked
from etude.preflight.finding import Findings
from etude.store.database import DATABASE
from etude.store.files import write_new_files
from etude.store.journal import Journal

_RUN = "trial"
_EPOCHS, _EXAMPLES, _GENERATIONS = 3, 4, 4
_SECONDS = 150.0
"""That one of the two processes may take; on two idle cores each takes about ten."""
_LOOK_SECONDS = 0.05
_LINES = 12

_AGENT = '''
import etude


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> str:
    reply = await episode.chat([{"role": "user", "content": example.inputs["question"]}])
    return reply.text


@etude.evaluator
def varied(example: etude.Example, output: str) -> float:
    """The share of different letters: even a model that has learnt nothing gets some."""
    return len(set(output)) / 8
'''


class TrialFailed(EtudeError):
    """The loop does not work here; the message says which part, and with which words."""


def try_loop(findings: Findings) -> None:
    """Train a tiny model in processes of their own, kill the first one, and have the second go on."""
    folder = Path(tempfile.mkdtemp(prefix="etude-doctor-"))
    begun = time.monotonic()
    try:
        with _as_findings(folder, findings):
            _write_project(folder)
            _try(folder, findings)
            findings.ok("loop", f"all of it took {time.monotonic() - begun:.0f} s")
    finally:
        if not findings.of("error"):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _as_findings(folder: Path, findings: Findings) -> Iterator[None]:
    try:
        yield
    except EtudeError as error:
        findings.fail(
            "loop", f"{error}\nIts run is in {folder / 'runs' / _RUN}; mend what is said above first"
        )


def _try(folder: Path, findings: Findings) -> None:
    run = folder / "runs" / _RUN
    with _started(folder, "train", "config.yml", "--name", _RUN) as process:
        _wait_for_epoch(process, folder, run)
        # Without a warning, as when power is lost.
        process.send_signal(signal.SIGKILL)
        process.wait(_SECONDS)
    before = _steps(run)
    findings.ok("loop: collect", f"the first epoch's {_EXAMPLES * _GENERATIONS} episodes are in a journal")
    findings.ok("loop: train", f"{_versions(run)} versions of the weights were made before it was killed")
    with _started(folder, "resume", _RUN) as process:
        code = _end_of(process, folder)
    if code != 0:
        raise TrialFailed(f"the run was killed, and does not go on: exit code {code}\n{_said(folder)}")
    after = _steps(run)
    changed = [key for key, text in before.items() if after.get(key) != text]
    if changed:
        raise TrialFailed(
            f"{len(changed)} steps that the run had taken changed when it went on: {changed[0]}"
        )
    _require_trained(run)
    findings.ok(
        "loop: kill and resume", f"none of {len(before)} steps was taken twice; {_EPOCHS} epochs trained"
    )


def _wait_for_epoch(process: subprocess.Popen[bytes], folder: Path, run: Path) -> None:
    """Return in the middle of the second epoch."""
    begun = time.monotonic()
    while not _lines(run):
        if process.poll() is not None:
            raise TrialFailed(
                f"a run on a tiny model ended with exit code {process.returncode}\n{_said(folder)}"
            )
        if time.monotonic() - begun > _SECONDS:
            raise TrialFailed(
                f"a run on a tiny model trained no epoch within {_SECONDS:g} s\n{_said(folder)}"
            )
        time.sleep(_LOOK_SECONDS)


def _end_of(process: subprocess.Popen[bytes], folder: Path) -> int:
    try:
        return process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        raise TrialFailed(
            f"the run was killed, and did not end within {_SECONDS:g} s when it went on\n{_said(folder)}"
        ) from None


@contextlib.contextmanager
def _started(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process of its own, which has ended after the block."""
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "etude", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(_SECONDS)


def _said(folder: Path) -> str:
    """The end of what the last command printed."""
    text = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    return masked("\n".join(text.splitlines()[-_LINES:]))


def _lines(run: Path) -> list[dict[str, object]]:
    """The epochs that the run has written down."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        text = (run / "training_metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]
    return []


def _steps(run: Path) -> dict[str, str]:
    """The calls, episodes and scores of training, by their keys."""
    with Journal(run / DATABASE, read_only=True) as journal:
        return {key: json.dumps(value) for key, value in journal.scan() if key.startswith("train/")}


def _versions(run: Path) -> int:
    return len([path for path in (run / "checkpoints").glob("v*") if path.name != "v0"])


def _require_trained(run: Path) -> None:
    """Raise TrialFailed unless every epoch made weights that are not those before."""
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrialFailed(f"the run ended without a summary ({error})") from error
    if summary.get("epochs_trained") != _EPOCHS:
        raise TrialFailed(f"{summary.get('epochs_trained')} of {_EPOCHS} epochs were trained")


def _write_project(folder: Path) -> None:
    from etude.models.tiny import build_policy, build_tokenizer

    questions = [f"{number} and {number + 1}?" for number in range(_EXAMPLES)]
    build_policy(build_tokenizer([*questions, "0123456789"], splits=["[0-9]"]), 0).export(folder / "base")
    rows = [{"id": str(number), "question": text} for number, text in enumerate(questions)]
    config = {
        "llms": {"policy": {"_type": "local", "model": str(folder / "base"), "max_tokens": 8}},
        "workflow": "agent:play",
        "eval": {"general": {"dataset": "train.jsonl"}, "evaluators": {"varied": "agent:varied"}},
        "trajectory_builders": {"grpo": {"_type": "grpo", "num_generations": _GENERATIONS}},
        "trainer_adapters": {"local": {"_type": "local", "learning_rate": 3e-3}},
        "finetuning": {"enabled": True, "num_epochs": _EPOCHS},
    }
    contents = {"agent.py": _AGENT, "train.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}
    write_new_files(folder, contents | {"config.yml": dump(config)})

"""Agents and evaluators that raise, return what nobody expects, or harm their process.

Each deed is done by one of four episodes of an evaluation. The others have to be whole, and of the one
something has to be said: a failed episode, or no score, with its cause. Where agents are played in the run's
own process, deeds that end a process end the run, which must not end as if all were well.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from etude.run import Run
from tests.chaos.deeds import DEEDS, FATAL, HARMLESS, HARMLESS_OUTPUTS
from tests.chaos.scene import Figures, Scene
from tests.cli.projects import process

WHO = ("agent", "agent in a thread", "evaluator")
_EVERY = (1, 6)
"""Of these, in full and with `--quick`."""
_AT_ONCE = 4
_LIMIT_SECONDS = 240.0
_TIMEOUT_SECONDS = 3
"""Of an episode and of an evaluation."""


def misbehave(scene: Scene) -> Figures:
    """All deeds of all three, or some, with each isolation; what each came to, where it should not."""
    deeds = [(who, deed) for who in WHO for deed in DEEDS][:: _EVERY[scene.quick]]
    cases = [(who, deed, isolation) for isolation in ("none", "process") for who, deed in deeds]
    scene.note(f"{len(cases)} faults of agents and evaluators")

    def play_case(number: int) -> str | None:
        place, begun = scene.folder / f"deed-{number}", time.monotonic()
        problem = _play(place, *cases[number])
        shutil.rmtree(place)
        seconds = time.monotonic() - begun
        return problem and f"{', '.join(cases[number])}: {problem}, after {seconds:.0f} s"

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        problems = [problem for problem in pool.map(play_case, range(len(cases))) if problem]
    return {"faults": len(cases), "problems": problems}


def _play(folder: Path, who: str, deed: str, isolation: str) -> str | None:
    """The fault in how an evaluation ends in which somebody does it; None if nothing is."""
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("deeds.py"), folder / "chaos_deeds.py")
    rows = [{"id": f"good{n}", "deed": "", "who": "nobody"} for n in range(3)]
    rows.append({"id": "bad", "deed": deed, "who": who})
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    workflow = "play_in_a_thread" if who == "agent in a thread" else "play"
    limits: dict[str, Any] = {"timeout": _TIMEOUT_SECONDS, "max_concurrency": 2}
    if isolation != "none":
        limits |= {"isolation": isolation}
    if isolation == "process":
        limits |= {"runners": 2, "runner_memory": 1.5}
    config = {
        "llms": {"policy": {"_type": "tests.cli.parts:scripted"}},
        "workflow": f"chaos_deeds:{workflow}",
        "eval": {
            "general": {"dataset": "examples.jsonl", **limits},
            "evaluators": {"score": "chaos_deeds:score"},
        },
        "finetuning": {"error_budget": 1.0},
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    fatal = FATAL if isolation == "none" else frozenset()
    started = process("evaluate", "config.yml", "--name", "e", folder=folder)
    try:
        _, errors = started.communicate(timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        started.kill()
        return None if deed in fatal else "it hangs"
    return _verdict(folder, started.wait(), errors, who, deed, deed in fatal)


def _verdict(folder: Path, code: int, errors: str, who: str, deed: str, is_fatal: bool) -> str | None:
    if is_fatal and (code or "os._exit" in deed):
        return None
    if code not in (0, 1):
        return f"the run ended with {code}: {errors[-300:]}"
    if code == 1:
        return f"the run failed: {errors[-300:]}"
    if not (folder / "runs" / "e" / "items.jsonl").exists():
        return "the run ended in the middle, with exit code 0"
    episodes = {episode.example.id: episode for episode in Run(folder / "runs" / "e").episodes}
    lines = (folder / "runs" / "e" / "items.jsonl").read_text().splitlines()
    scored = {row["id"]: row for row in map(json.loads, lines)}
    for name in ("good0", "good1", "good2"):
        if (
            name not in episodes
            or episodes[name].failure is not None
            or scored[name]["scores"]["score"] != 0.5
        ):
            return f"'{name}', which did nothing, has failed too: {episodes.get(name)}"[:300]
    bad, row = episodes.get("bad"), scored.get("bad")
    if bad is None or row is None:
        return "its episode is missing"
    is_told_of = bad.failure is not None or row["scores"]["score"] is None
    harmless = HARMLESS if who == "evaluator" else HARMLESS_OUTPUTS
    if not is_told_of and deed not in harmless:
        return f"nothing is said of it: output {str(bad.output)[:80]!r}, score {row['scores']['score']!r}"
    return None

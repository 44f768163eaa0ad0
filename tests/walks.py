"""Count the files that a value goes through: those with a function that takes or returns it.

`python -m tests.walks` plays walks of docs/architecture.md with a profiler in all threads. A value counts as
taken if it is in an argument, however deep in lists, dicts and Etude's values, but not in other objects.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import BaseModel
from starlette.testclient import TestClient

import etude
from etude.server.backend import EmbeddedBackend
from etude.server.serve import create_app
from etude.server.settings import ServerSettings

SOURCE = f"{Path(etude.__file__).parent}/"
OPTION = 0.12345
"""A value that nothing else in the run has."""
_DEEPEST, _MOST = 8, 200


class Trace:
    """The files, by walk, of functions that take or return the walk's value."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """`values` has a number, a text or a list of token ids for each walk."""
        self.files: dict[str, set[str]] = {walk: set() for walk in values}
        self._values = {
            walk: [*value] if isinstance(value, tuple) else value for walk, value in values.items()
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at all calls in the block, in this thread and in those that it starts."""
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _look(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(SOURCE):
            return
        file = code.co_filename.removeprefix(SOURCE)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        known = frame.f_locals if event == "call" else {}
        seen = [result] if event == "return" else [known.get(name) for name in names if name != "self"]
        for walk, value in self._values.items():
            if file not in self.files[walk] and any(_holds(each, value) for each in seen):
                self.files[walk].add(file)


def _holds(place: Any, value: Any, depth: int = 0) -> bool:
    """Return whether the value is in `place`, however deep in plain values."""
    if isinstance(place, str):
        return isinstance(value, str) and value in place
    if isinstance(place, bytes):
        return isinstance(value, str) and value.encode() in place
    if isinstance(place, float):
        return bool(place == value)
    if type(place).__name__ in ("Tensor", "ndarray"):
        return isinstance(value, list) and place.ndim > 0 and _has_part(place.reshape(-1).tolist(), value)
    if isinstance(place, list | tuple) and place and isinstance(place[0], int):
        return isinstance(value, list) and _has_part([*place], value)
    if depth == _DEEPEST:
        return False
    if isinstance(place, Mapping):
        parts = [*place.values()]
    elif isinstance(place, list | tuple):
        parts = [*place]
    elif isinstance(place, BaseModel):
        parts = [*vars(place).values()]
    elif dataclasses.is_dataclass(place) and type(place).__module__.startswith("etude."):
        parts = [getattr(place, each.name, None) for each in dataclasses.fields(place)]
    else:
        return False
    return any(_holds(part, value, depth + 1) for part in parts[:_MOST])


def _has_part(ids: list[Any], part: list[int]) -> bool:
    places = (place for place, each in enumerate(ids) if each == part[0])
    return any(ids[place : place + len(part)] == part for place in places)


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> str:
    reply = await episode.chat([{"role": "user", "content": example.inputs["question"]}])
    return reply.text


@etude.evaluator
def score(example: etude.Example, output: str) -> float:
    return float(len(output) % 3)


def train(name: str) -> etude.Run:
    """Train a tiny model for an epoch. The same tokens are sampled each time."""
    return etude.train(
        play,
        reward=score,
        examples="rows.json",
        model={"_type": "local", "tiny": {}, "max_tokens": 8},
        algorithm=etude.Grpo(group=4, clip_low=OPTION),
        epochs=1,
        deterministic=True,
        progress=False,
        name=name,
    )


def ask(folder: Path, model: Path, text: str) -> None:
    """Ask a server for a completion, without a socket."""
    folder.mkdir()
    settings = ServerSettings(model=str(model), data_dir=folder, name="tiny")
    backend = EmbeddedBackend(settings)
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    app = create_app(settings, backend)
    asyncio.run(backend.open())
    with TestClient(app, base_url="http://localhost") as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


def walks() -> dict[str, list[str]]:
    """Return the files of each walk. Runs are written to the current folder."""
    rows = [{"id": "a", "question": "how many?"}, {"id": "b", "question": "how far?"}]
    Path("rows.json").write_text(json.dumps(rows))
    first = next(iter(train("first").episodes)).calls[0].completion
    assert first is not None
    job = "walk-epoch-1"
    whole = Trace(
        {
            "An option to the gradient": OPTION,
            "A call to the batch": first.completion_ids,
            "A job to its weights": job,
        }
    )
    with whole.watching():
        run = train("walk")
    resumed = Trace({"A killed run to its end": job})
    with resumed.watching():
        etude.resume(run, agent=play, reward=score, epochs=2, progress=False)
    question = "zyzzyva?"
    served = Trace({"A request at a server": question})
    with served.watching():
        ask(Path("server").absolute(), next(run.folder.rglob("tokenizer.json")).parent, question)
    return {walk: sorted(files) for trace in (whole, resumed, served) for walk, files in trace.files.items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        print(json.dumps(walks(), indent=1))  # noqa: T201
        os.chdir("/")

"""A stand-in for `art run` on a real socket: its own protocol, and the inference that it serves beside it.

It is as openpipe-art 0.4.11 and 0.5.17: there are no job ids, the end of the stream is the only sign of
success, and a batch without differing rewards advances the step without training.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import Body, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, TypeAdapter

from tests.json_server import chat_completion

KEY = "secret-key"


class Model(BaseModel):
    """`art.TrainableModel`."""

    name: str
    project: str
    config: None = None
    trainable: bool = True
    base_model: str


class Trajectory(BaseModel):
    """`art.Trajectory`."""

    messages_and_choices: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    additional_histories: list[Any] = []
    reward: float
    metrics: dict[str, float | int | bool] = {}
    metadata: dict[str, float | int | str | bool | None] = {}
    logs: list[str] = []


class Group(BaseModel):
    """`art.TrajectoryGroup`."""

    trajectories: list[Trajectory]
    exceptions: list[Any] = []


class StandIn:
    """A server in a thread. Its attributes may be changed while it runs."""

    def __init__(self, *, release: str = "0.5") -> None:
        self.release = release
        """0.4 serves the model by its bare name."""
        self.url = ""
        self.steps: Counter[str] = Counter()
        self.models: dict[str, dict[str, Any]] = {}
        self.jobs: list[dict[str, Any]] = []
        """The bodies of the train requests."""
        self.sampled: Counter[str] = Counter()
        """Chat completions by the model that was asked."""
        self.requests: list[str] = []
        self.well = True
        self.training = "well"
        """`well`, `refused`, `broken` (drops the connection), `half` (ends early), `garbled`, `silent`,
        `lost` (drops the connection and trains to the end), `no_step`, `doubled`."""
        self.serves = True
        self.keys: set[str] = set()
        self.silent_steps = 0
        """How many questions for the step after a job are answered with an error."""
        self.pause = 0.0
        """Seconds before the first line of a training stream."""
        self.begun = threading.Event()
        """Whether a training stream has begun, and will pause for as long as it was told then."""

    def app(self) -> FastAPI:
        async def note(request: Request) -> None:
            self.requests.append(f"{request.method} {request.url.path}")
            self.keys.add(request.headers.get("authorization", ""))

        app = FastAPI(dependencies=[Depends(note)])
        app.get("/healthcheck")(self._health)
        app.post("/register")(self._register)
        app.post("/_get_step")(self._get_step)
        app.post("/_prepare_backend_for_training")(self._prepare)
        app.post("/_train_model")(self._train)
        app.get("/v1/models")(self._list)
        app.post("/v1/chat/completions")(self._complete)
        return app

    def names(self) -> list[str]:
        """The models that inference serves."""
        bases = {model["base_model"] for model in self.models.values()}
        if not self.serves:
            return sorted(bases)
        tuned = [
            f"{name}@{step}"
            for name in self.models
            for step in range(self.steps[name] + 1)
            if self.release == "0.5"
        ]
        return [*sorted(bases), *(tuned or self.models)]

    async def _health(self) -> Any:
        return {"status": "ok"} if self.well else JSONResponse({"detail": "CUDA is gone"}, 500)

    async def _register(self, request: Request) -> None:
        body = await request.json()
        self.models[Model.model_validate(body).name] = body

    async def _get_step(self, model: Model) -> int:
        if self.jobs and self.silent_steps:
            self.silent_steps -= 1
            raise HTTPException(503, "busy")
        return self.steps[model.name]

    async def _prepare(self, model: Model, config: dict[str, Any] | None = Body(None)) -> tuple[str, str]:  # noqa: B008
        return f"{self.url}/v1", "default"

    async def _train(self, request: Request) -> Response:
        body = await request.json()
        self.jobs.append(body)
        if self.training == "refused":
            return JSONResponse({"detail": f"Out of memory, {request.headers['authorization']}"}, 500)
        name = Model.model_validate(body["model"]).name
        groups = [Group.model_validate(group) for group in body["trajectory_groups"]]
        for group in groups:
            for trajectory in group.trajectories:
                check_messages(trajectory)
        assert isinstance(body["config"]["learning_rate"], float)
        return StreamingResponse(self._stream(name, groups))

    async def _stream(self, name: str, groups: list[Group]) -> AsyncIterator[str]:
        pause = self.pause
        self.begun.set()
        await asyncio.sleep(pause)
        trainable = [group for group in groups if len({one.reward for one in group.trajectories}) > 1]
        total = len(trainable) if self.training != "nothing" else 0
        key = "num_gradient_steps" if self.release == "0.4" else "data/step_num_gradient_steps"
        if not total:
            self.steps[name] += 1
            if self.release == "0.5":
                yield json.dumps({"data/step_num_groups_trainable": 0.0, key: 0.0}) + "\n"
            return
        for place in range(total):
            yield json.dumps({"loss": 1.0 / (1 + place), "grad_norm": 0.5, key: total}) + "\n"
            if self.training == "half":
                return
            if self.training == "silent":
                await asyncio.sleep(60)
            if self.training == "garbled":
                yield "<html>\n"
                return
            if self.training == "lost":
                self.steps[name] += 1
            if self.training in ("broken", "lost"):
                raise ConnectionError("the cable was pulled")
        self.steps[name] += {"no_step": 0, "doubled": 2}.get(self.training, 1)

    async def _list(self) -> Any:
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in self.names()]}

    async def _complete(self, request: Request) -> Any:
        body = await request.json()
        name = body["model"]
        self.sampled[name] += 1
        if name not in self.names():
            return JSONResponse({"error": {"message": f"The model `{name}` does not exist."}}, 404)
        TypeAdapter(list[ChatCompletionMessageParam]).validate_python(body["messages"])
        step = int(name.partition("@")[2] or self.steps[name])
        luck = int(hashlib.md5(str(body.get("seed")).encode()).hexdigest(), 16) % 100
        text = "yes" if luck < 30 + 20 * step else "no"
        return _completion(name, text)


def check_messages(trajectory: Trajectory) -> None:
    """The assertions of `tokenize_trajectory`: a choice has logprobs, whose tokens it can read."""
    sampled = 0
    for message in trajectory.messages_and_choices:
        if "finish_reason" not in message:
            TypeAdapter(ChatCompletionMessageParam).validate_python(message)
            continue
        choice = Choice.model_validate(message)
        assert choice.logprobs and choice.logprobs.content, "Chat completion choices must have logprobs"
        assert all(int(token.token.split(":")[1]) >= 0 for token in choice.logprobs.content)
        sampled += 1
    assert sampled, "There are no assistant logprobs to train on."
    TypeAdapter(list[ChatCompletionToolParam]).validate_python(trajectory.tools or [])


def _completion(name: str, text: str) -> Any:
    tokens = [*text.encode(), 2]
    content = [
        {"token": f"token_id:{token}", "logprob": -token / 1000, "bytes": None, "top_logprobs": []}
        for token in tokens
    ]
    logprobs = {"content": content, "refusal": None}
    answer = chat_completion(name, text, 3, len(tokens), logprobs=logprobs)
    ChatCompletion.model_validate(answer)
    return answer


@contextmanager
def running(server: StandIn) -> Iterator[StandIn]:
    """The stand-in on a port of its own, until the block is left."""
    with serving(server.app()) as server.url:
        yield server


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """An application on a port of its own, in a thread; its address."""
    host = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=host.run, daemon=True)
    thread.start()
    while not host.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{host.servers[0].sockets[0].getsockname()[1]}"
    finally:
        host.should_exit = host.force_exit = True
        thread.join(10)

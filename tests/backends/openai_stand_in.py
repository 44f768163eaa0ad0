"""A stand-in for OpenAI's API and its official SDK: files, jobs, events, errors, pages, and completions."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

import httpx
from openai import AsyncOpenAI
from openai.types import FileObject
from openai.types.chat import ChatCompletion
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.backends.art_stand_in import serving
from tests.json_server import chat_completion

KEY = "sk-test"
BASE = "gpt-4o-mini-2024-07-18"
FINAL = ("succeeded", "failed", "cancelled")
ORDER = ["validating_files", "queued", "running"]


class StandIn:
    """Files, jobs and models. A job goes one state further each time it is asked after.

    `ending` is how jobs end; files of fewer than `min_rows` fail. `page` is the longest page of a list.
    Requests take the `faults` that name them one by one: `lost`, or a function that is called, does what was
    asked and gives no answer; a number is a status. `say` answers a chat by model and number of the request.
    """

    def __init__(
        self,
        *,
        ending: str = "succeeded",
        page: int = 100,
        min_rows: int = 10,
        say: Callable[[str, int], str] = lambda model, number: "yes",
    ) -> None:
        self.ending = ending
        self.page = page
        self.min_rows = min_rows
        self.say = say
        self.faults: dict[str, list[str | int | Callable[[], object]]] = defaultdict(list)
        self.files: dict[str, FileObject] = {}
        self.contents: dict[str, bytes] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.models = {BASE}
        self.requests: list[str] = []
        self.headers: list[httpx.Headers] = []
        self.sampled: list[str] = []
        """The model of each chat completion."""
        self._lock = threading.Lock()

    def client(self, key: str = KEY) -> AsyncOpenAI:
        """A client, as another process would make one."""
        http: Any = httpx.AsyncClient(transport=httpx.MockTransport(self.answer))
        return AsyncOpenAI(
            api_key=key, base_url="http://stand-in.invalid/v1", http_client=http, max_retries=0
        )

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Answer over HTTP on this machine; the base URL. Where an answer is to get lost, it is a failure."""

        async def answer(request: Request) -> Response:
            asked = httpx.Request(
                request.method, str(request.url), headers=request.headers.raw, content=await request.body()
            )
            answered = await asyncio.to_thread(self.answer, asked)
            return Response(answered.content, answered.status_code, media_type="application/json")

        route = Route("/{path:path}", answer, methods=["GET", "POST", "DELETE"])
        with serving(Starlette(routes=[route])) as url:
            yield f"{url}/v1"

    def rows(self, job_id: str) -> list[dict[str, Any]]:
        """The training file of a job."""
        text = self.contents[self.jobs[job_id]["training_file"]].decode()
        return [json.loads(line) for line in text.splitlines()]

    def count(self, request: str) -> int:
        """How often something was asked for, like `POST /files`."""
        return self.requests.count(request)

    def answer(self, request: httpx.Request) -> httpx.Response:
        """The API. Raises httpx.ReadError where the answer is to get lost."""
        with self._lock:
            return self._answer(request)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/v1")
        name = f"{request.method} {path}"
        self.requests.append(name)
        self.headers.append(request.headers)
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return error_response(401, "Incorrect API key provided.", "invalid_api_key")
        faults = self.faults[re.sub(r"ftjob-\d+", "ID", name)]
        fault = faults.pop(0) if faults else None
        if isinstance(fault, int):
            return error_response(fault, "The server had an error", "server_error")
        response = self._route(request, path)
        if callable(fault):
            fault()
        if fault is not None:
            raise httpx.ReadError("the connection broke", request=request)
        return response

    def _route(self, request: httpx.Request, path: str) -> httpx.Response:
        for method, pattern, handler in self.routes():
            match = re.fullmatch(pattern, path)
            if match and method == request.method:
                if match.groups() and match[1] not in self.jobs:
                    return error_response(404, f"Could not find fine tune: {match[1]}", "fine_tune_not_found")
                return handler(request, *match.groups())
        return error_response(404, f"Unknown request URL: {request.method} {path}", "unknown_url")

    def routes(self) -> list[tuple[str, str, Callable[..., httpx.Response]]]:
        """Method, pattern of the path, and who answers."""
        return [
            ("POST", r"/files", self._upload),
            ("GET", r"/files", self._list_files),
            ("POST", r"/fine_tuning/jobs", self._create),
            ("GET", r"/fine_tuning/jobs", self._list),
            ("GET", r"/fine_tuning/jobs/([^/]+)", self._retrieve),
            ("POST", r"/fine_tuning/jobs/([^/]+)/cancel", self._cancel),
            ("GET", r"/fine_tuning/jobs/([^/]+)/events", self._events),
            ("POST", r"/chat/completions", self._complete),
        ]

    def _upload(self, request: httpx.Request) -> httpx.Response:
        header = f"content-type: {request.headers['content-type']}\r\n\r\n".encode()
        parts = BytesParser(policy=HTTP).parsebytes(header + request.read())
        fields = {part.get_param("name", header="content-disposition"): part for part in parts.iter_parts()}
        assert fields["purpose"].get_content().strip() == "fine-tune"
        content = fields["file"].get_payload(decode=True)
        name = f"file-{len(self.files)}"
        self.contents[name] = content
        self.files[name] = FileObject(
            id=name,
            bytes=len(content),
            created_at=len(self.files),
            filename=fields["file"].get_filename(),
            object="file",
            purpose="fine-tune",
            status="processed",
        )
        return httpx.Response(200, json=self.files[name].model_dump())

    def _list_files(self, request: httpx.Request) -> httpx.Response:
        return self._page(request, [file.model_dump() for file in reversed(self.files.values())])

    def method_types(self) -> set[str]:
        """The states of a job."""
        return {"supervised", "dpo"}

    def _create(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.read())
        kind = body["method"]["type"]
        if body["training_file"] not in self.files:
            return error_response(400, f"invalid training_file: {body['training_file']}", "invalid_value")
        if body["model"] not in self.models:
            return error_response(
                400, f"Model {body['model']} is not available for fine-tuning", "model_not_available"
            )
        if kind not in self.method_types() or set(body["method"]) != {"type", kind}:
            return error_response(400, f"Invalid value: '{kind}'", "invalid_value")
        assert len(body["suffix"]) <= 64
        assert all(len(key) <= 64 and len(value) <= 512 for key, value in body["metadata"].items())
        name = f"ftjob-{len(self.jobs)}"
        job = {
            "id": name,
            "object": "fine_tuning.job",
            "created_at": len(self.jobs),
            "status": "validating_files",
            "error": None,
            "fine_tuned_model": None,
            "finished_at": None,
            "hyperparameters": {"n_epochs": "auto"},
            "organization_id": "org-test",
            "result_files": [],
            "seed": body.get("seed", 1),
            "trained_tokens": None,
            "validation_file": None,
            **{key: body[key] for key in ("model", "training_file", "method", "metadata")},
            "suffix": body["suffix"],
        }
        if kind in ("supervised", "dpo"):
            FineTuningJob.model_validate(job)
        self.jobs[name] = job
        return httpx.Response(200, json=job)

    def _list(self, request: httpx.Request) -> httpx.Response:
        query = request.url.params
        wanted = {key[9:-1]: value for key, value in query.items() if key.startswith("metadata[")}
        jobs = [job for job in reversed(self.jobs.values()) if wanted.items() <= job["metadata"].items()]
        return self._page(request, jobs)

    def _page(self, request: httpx.Request, found: list[dict[str, Any]]) -> httpx.Response:
        query = request.url.params
        if "after" in query:
            found = found[[one["id"] for one in found].index(query["after"]) + 1 :]
        limit = min(int(query.get("limit", 20)), self.page)
        return httpx.Response(
            200, json={"object": "list", "data": found[:limit], "has_more": len(found) > limit}
        )

    def _retrieve(self, request: httpx.Request, name: str) -> httpx.Response:
        job = self.jobs[name]
        told = dict(job)
        if job["status"] not in FINAL:
            self._go_on(job)
        return httpx.Response(200, json=told)

    def _go_on(self, job: dict[str, Any]) -> None:
        rows = len(self.rows(job["id"]))
        if rows < self.min_rows:
            text = f"Training file has {rows} example(s), but must have at least {self.min_rows} examples"
            job["status"], job["error"] = "failed", _job_error("invalid_n_examples", text)
            return
        order = [*ORDER, self.ending]
        job["status"] = order[order.index(job["status"]) + 1]
        if job["status"] == "succeeded":
            base = job["model"].removeprefix("ft:").split(":")[0]
            job["fine_tuned_model"] = f"ft:{base}:org::{job['id']}"
            job["trained_tokens"] = len(self.contents[job["training_file"]])
            self.models.add(job["fine_tuned_model"])
        elif job["status"] == "failed":
            text = "The job failed due to an invalid training file"
            job["error"] = _job_error("invalid_training_file", text)

    def _cancel(self, request: httpx.Request, name: str) -> httpx.Response:
        job = self.jobs[name]
        if job["status"] in FINAL:
            return error_response(400, f"Job has already completed: {name}", "job_already_completed")
        job["status"] = "cancelled"
        return httpx.Response(200, json=job)

    def _events(self, request: httpx.Request, name: str) -> httpx.Response:
        """More of them the further the job is; newest first."""
        reached = [*ORDER, *FINAL].index(self.jobs[name]["status"])
        steps = [
            {"step": step, "total_steps": 2, "train_loss": 1 / step, "train_mean_token_accuracy": 0.5}
            for step in (1, 2)
        ]
        told: list[tuple[str, Any]] = [("Created fine-tuning job: " + name, None)]
        told += [("Fine-tuning job started", None), (f"Step 1/2: training loss={1.0}", steps[0])] * (
            reached >= ORDER.index("running")
        )
        told += [("Step 2/2: training loss=0.5", steps[1])] * (reached >= len(ORDER))
        events = [
            FineTuningJobEvent(
                id=f"ftevent-{name}-{place}",
                created_at=place,
                level="info",
                message=text,
                object="fine_tuning.job.event",
                type="message" if data is None else "metrics",
                data=data,
            ).model_dump()
            for place, (text, data) in enumerate(told)
        ]
        return self._page(request, events[::-1])

    def _complete(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.read())
        if body["model"] not in self.models:
            return error_response(
                404,
                f"The model `{body['model']}` does not exist or you do not have access",
                "model_not_found",
            )
        self.sampled.append(body["model"])
        text = self.say(body["model"], len(self.sampled))
        logprobs = None
        if body.get("logprobs"):
            token = {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": []}
            logprobs = {"content": [token], "refusal": None}
        reply = chat_completion(body["model"], text, 5, logprobs=logprobs)
        ChatCompletion.model_validate(reply)
        return httpx.Response(200, json=reply)


def error_response(status: int, message: str, code: str) -> httpx.Response:
    """OpenAI's error object."""
    kind = "invalid_request_error" if status < 429 else "requests"
    return httpx.Response(
        status, json={"error": {"message": message, "type": kind, "param": None, "code": code}}
    )


def _job_error(code: str, message: str) -> dict[str, str]:
    return {"code": code, "message": message, "param": "training_file"}

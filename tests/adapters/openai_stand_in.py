"""What OpenAI's fine-tuning API answers, for the official SDK: files, jobs, events, errors, pages."""

from __future__ import annotations

import json
import re
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

import httpx
from openai import AsyncOpenAI
from openai.types import FileObject
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent

KEY = "sk-test"
FINAL = ("succeeded", "failed", "cancelled")


class StandIn:
    """Files and jobs. A job goes one state further each time it is asked after.

    `ending` is how jobs end. The first `daily_limits` creations are refused because the day's jobs are
    used up. Any number of clients may share it, as processes share the API.
    """

    def __init__(self, *, ending: str = "succeeded", daily_limits: int = 0) -> None:
        self.ending = ending
        self.daily_limits = daily_limits
        self.files: dict[str, bytes] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []

    def client(self, key: str = KEY) -> AsyncOpenAI:
        """A client, as another process would make one."""
        http: Any = httpx.AsyncClient(transport=httpx.MockTransport(self.answer))
        return AsyncOpenAI(
            api_key=key, base_url="http://stand-in.invalid/v1", http_client=http, max_retries=0
        )

    def rows(self, job_id: str) -> list[dict[str, Any]]:
        """The training file of a job."""
        text = self.files[self.jobs[job_id]["training_file"]].decode()
        return [json.loads(line) for line in text.splitlines()]

    def answer(self, request: httpx.Request) -> httpx.Response:
        """The API."""
        path = request.url.path.removeprefix("/v1")
        self.requests.append(f"{request.method} {path}")
        if request.headers["authorization"] != f"Bearer {KEY}":
            return _error(401, "Incorrect API key provided.", "invalid_api_key")
        routes = [
            ("POST", r"/files", self._upload),
            ("POST", r"/fine_tuning/jobs", self._create),
            ("GET", r"/fine_tuning/jobs", self._list),
            ("GET", r"/fine_tuning/jobs/([^/]+)", self._retrieve),
            ("POST", r"/fine_tuning/jobs/([^/]+)/cancel", self._cancel),
            ("GET", r"/fine_tuning/jobs/([^/]+)/events", self._events),
        ]
        for method, pattern, handler in routes:
            match = re.fullmatch(pattern, path)
            if match and method == request.method:
                if match.groups() and match[1] not in self.jobs:
                    return _error(404, f"Could not find fine tune: {match[1]}", "fine_tune_not_found")
                return handler(request, *match.groups())
        return _error(404, f"Unknown request URL: {request.method} {path}", "unknown_url")

    def _upload(self, request: httpx.Request) -> httpx.Response:
        header = f"content-type: {request.headers['content-type']}\r\n\r\n".encode()
        parts = BytesParser(policy=HTTP).parsebytes(header + request.read())
        fields = {part.get_param("name", header="content-disposition"): part for part in parts.iter_parts()}
        assert fields["purpose"].get_content().strip() == "fine-tune"
        content = fields["file"].get_payload(decode=True)
        name = f"file-{len(self.files)}"
        self.files[name] = content
        file = FileObject(
            id=name,
            bytes=len(content),
            created_at=len(self.files),
            filename=fields["file"].get_filename(),
            object="file",
            purpose="fine-tune",
            status="processed",
        )
        return httpx.Response(200, json=file.model_dump())

    def _create(self, request: httpx.Request) -> httpx.Response:
        if self.daily_limits > 0:
            self.daily_limits -= 1
            return _error(429, "You have used up today's fine-tuning jobs.", "daily_rate_limit_exceeded")
        body = json.loads(request.read())
        if body["training_file"] not in self.files:
            return _error(400, f"invalid training_file: {body['training_file']}", "invalid_value")
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
            "seed": 1,
            "trained_tokens": None,
            "validation_file": None,
            **{key: body[key] for key in ("model", "training_file", "method", "metadata")},
            "suffix": body["suffix"],
        }
        FineTuningJob.model_validate(job)
        self.jobs[name] = job
        return httpx.Response(200, json=job)

    def _list(self, request: httpx.Request) -> httpx.Response:
        query = request.url.params
        wanted = {key[9:-1]: value for key, value in query.items() if key.startswith("metadata[")}
        jobs = [job for job in reversed(self.jobs.values()) if wanted.items() <= job["metadata"].items()]
        if "after" in query:
            jobs = jobs[[job["id"] for job in jobs].index(query["after"]) + 1 :]
        limit = int(query.get("limit", 20))
        page = {"object": "list", "data": jobs[:limit], "has_more": len(jobs) > limit}
        return httpx.Response(200, json=page)

    def _retrieve(self, request: httpx.Request, name: str) -> httpx.Response:
        job = self.jobs[name]
        told = dict(job)
        if job["status"] not in FINAL:
            order = ["validating_files", "queued", "running", self.ending]
            job["status"] = order[order.index(job["status"]) + 1]
            if job["status"] == "succeeded":
                job["fine_tuned_model"] = f"ft:{job['model'].split(':')[-1]}:org::{name}"
                job["trained_tokens"] = len(self.files[job["training_file"]])
            elif job["status"] == "failed":
                job["error"] = {
                    "code": "invalid_training_file",
                    "message": "The job failed due to an invalid training file",
                    "param": "training_file",
                }
        return httpx.Response(200, json=told)

    def _cancel(self, request: httpx.Request, name: str) -> httpx.Response:
        job = self.jobs[name]
        if job["status"] in FINAL:
            return _error(400, f"Job has already completed: {name}", "job_already_completed")
        job["status"] = "cancelled"
        return httpx.Response(200, json=job)

    def _events(self, request: httpx.Request, name: str) -> httpx.Response:
        texts = ["Created fine-tuning job", "Fine-tuning job started", "Step 1/1: training loss=0.5"]
        events = [
            FineTuningJobEvent(
                id=f"ftevent-{place}",
                created_at=place,
                level="info",
                message=text,
                object="fine_tuning.job.event",
                type="message",
            )
            for place, text in enumerate(texts)
        ]
        page = {"object": "list", "data": [one.model_dump() for one in events[::-1]], "has_more": False}
        return httpx.Response(200, json=page)


def _error(status: int, message: str, code: str) -> httpx.Response:
    kind = "invalid_request_error" if status < 429 else "requests"
    return httpx.Response(
        status, json={"error": {"message": message, "type": kind, "param": None, "code": code}}
    )

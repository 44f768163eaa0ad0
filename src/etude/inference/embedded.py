"""The embedded engine: samples from a policy in this process, many requests at once."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass

from etude.core.call import ChatRequest, Completion, Usage
from etude.core.errors import EngineError
from etude.core.job import ModelVersion
from etude.inference.decoder import Decoder, Row, make_decoder
from etude.inference.sampler import uniforms
from etude.models.policy import Policy


@dataclass(slots=True, eq=False)
class _Job:
    """A request on its way through the engine's thread."""

    request: ChatRequest
    row: Row
    prompt_length: int
    limit: int
    """Length at which the row is cut."""
    drifted: bool
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    finish_reason: str = ""
    text: str = ""


class EmbeddedEngine:
    """Batches concurrent requests continuously: they join and leave at any step.

    One thread runs the model, step after step, for as long as there are requests. A request's tokens
    depend only on the weights, its prompt and its key, never on what else is in the batch (to the last
    bit with `deterministic`).
    """

    def __init__(
        self, policy: Policy, *, max_batch: int = 256, max_tokens: int = 512, deterministic: bool = False
    ) -> None:
        self.policy = policy
        self._max_batch = max_batch
        self._max_tokens = max_tokens
        self._decoder: Decoder = make_decoder(policy, slots=64, deterministic=deterministic)
        self._weights_id = policy.weights_id
        self._wake = threading.Condition()
        self._incoming: deque[_Job] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def version(self) -> int:
        """Number of the model version in memory."""
        return self.policy.version

    async def complete(self, request: ChatRequest) -> Completion:
        """Sample one assistant message. See `Engine.complete`."""
        job = self._prepare(request)
        with self._wake:
            if self._closed:
                raise EngineError("the engine is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="etude-engine", daemon=True)
                self._thread.start()
            self._incoming.append(job)
            self._wake.notify()
        return await job.future

    async def adopt(self, version: ModelVersion) -> None:
        """Sample from `version` from now on. See `Engine.adopt`."""
        await asyncio.to_thread(self.policy.adopt, version)

    async def close(self) -> None:
        """Stop the thread; requests still in it fail."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    def _prepare(self, request: ChatRequest) -> _Job:
        prompt = self.policy.template.prompt(request)
        room = self.policy.max_context - len(prompt.ids)
        if room < 1:
            raise EngineError(
                f"the prompt has {len(prompt.ids)} tokens, and the model's context ends at "
                f"{self.policy.max_context}; shorten the conversation"
            )
        sampling = request.sampling
        wanted = self._max_tokens if sampling.max_tokens is None else sampling.max_tokens
        loop = asyncio.get_running_loop()
        key = request.key if sampling.seed is None else sampling.seed
        row = Row(request.conversation, list(prompt.ids), sampling, uniforms(key))
        return _Job(
            request=request,
            row=row,
            prompt_length=len(prompt.ids),
            limit=len(prompt.ids) + min(wanted, room),
            drifted=prompt.drifted,
            loop=loop,
            future=loop.create_future(),
        )

    def _work(self) -> None:
        active: list[_Job] = []
        while self._admit(active):
            try:
                done = self._advance(active)
            except Exception as error:  # noqa: BLE001  whatever broke, nobody may be left waiting
                done = active
                self._deliver(done, EngineError(f"the engine failed: {type(error).__name__}: {error}"))
                self._decoder.forget()
            else:
                self._deliver(done)
            for job in done:
                self._decoder.release(job.row)
            active = [job for job in active if job not in done]
        with self._wake:
            active.extend(self._incoming)
            self._incoming.clear()
        self._deliver(active, EngineError("the engine was closed"))

    def _admit(self, active: list[_Job]) -> bool:
        """Take in waiting requests, sleep while there are none; False when the engine closes."""
        with self._wake:
            while not self._closed and not active and not self._incoming:
                self._wake.wait()
            while self._incoming and len(active) < self._max_batch:
                active.append(self._incoming.popleft())
            return not self._closed

    def _advance(self, active: list[_Job]) -> list[_Job]:
        """One step of the model; returns the jobs that are finished or were cancelled."""
        done = [job for job in active if job.future.cancelled()]
        alive = [job for job in active if job not in done] if done else active
        if not alive:
            return done
        with self.policy.lock:
            if self._weights_id != self.policy.weights_id:
                self._decoder.forget()
                self._weights_id = self.policy.weights_id
            grown = {id(row) for row in self._decoder.step([job.row for job in alive])}
        return done + [job for job in alive if id(job.row) in grown and self._is_finished(job)]

    def _is_finished(self, job: _Job) -> bool:
        row = job.row
        if row.ids[-1] in self.policy.stop_ids:
            job.finish_reason = "stop"
            job.text = self._decode(row.ids[job.prompt_length : -1])
        elif (cut := self._stop_string(job)) is not None:
            job.finish_reason, job.text = "stop", cut
        elif len(row.ids) >= job.limit:
            job.finish_reason = "length"
            job.text = self._decode(row.ids[job.prompt_length :])
        return bool(job.finish_reason)

    def _stop_string(self, job: _Job) -> str | None:
        """The text before the first stop string, once one has appeared."""
        if not job.row.sampling.stop:
            return None
        text = self._decode(job.row.ids[job.prompt_length :])
        found = [position for stop in job.row.sampling.stop if (position := text.find(stop)) >= 0]
        return text[: min(found)] if found else None

    def _decode(self, ids: list[int]) -> str:
        return str(self.policy.tokenizer.decode(ids, skip_special_tokens=False))

    def _deliver(self, jobs: list[_Job], error: EngineError | None = None) -> None:
        """Hand results over to the event loops that wait for them, one wake-up per loop."""
        for loop in {job.loop for job in jobs}:
            mine = [job for job in jobs if job.loop is loop and not job.future.cancelled()]
            results = [(job.future, error or self._completion(job)) for job in mine]
            if results and not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, results)

    def _completion(self, job: _Job) -> Completion:
        ids = job.row.ids
        message = self.policy.template.parse(job.text, job.request.tools)
        completion_ids = tuple(ids[job.prompt_length :])
        return Completion(
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") else job.finish_reason,
            prompt_ids=tuple(ids[: job.prompt_length]),
            completion_ids=completion_ids,
            logprobs=tuple(job.row.logprobs),
            usage=Usage(job.prompt_length, len(completion_ids)),
            model_version=self.policy.version,
            drifted=job.drifted,
        )


def _resolve(batch: list[tuple[asyncio.Future[Completion], Completion | EngineError]]) -> None:
    for future, result in batch:
        if future.done():
            continue
        if isinstance(result, EngineError):
            future.set_exception(result)
        else:
            future.set_result(result)

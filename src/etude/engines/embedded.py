"""The embedded engine: samples from a policy in this process, many requests at once."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import torch

from etude.core.call import ChatRequest, Completion, Delta, Sampling, Usage
from etude.core.errors import EngineError, ImpossibleCall, error_words
from etude.core.interfaces import Engine
from etude.core.job import ModelVersion
from etude.engines.answer import TokenEngine, before_stop, sample_message
from etude.engines.decoder import MOST_ROWS, RaggedDecoder, RecomputeDecoder, SlotDecoder, fuses
from etude.engines.graph_decoder import GraphDecoder
from etude.engines.sampler import LiveRow, uniforms
from etude.models.answer_parsing import Decode
from etude.models.architecture import takes_key_value_slots
from etude.models.device import release_threads
from etude.models.policy import Policy
from etude.models.text_codec import TextCodec

Decoder: TypeAlias = SlotDecoder | GraphDecoder | RecomputeDecoder

_LOG = logging.getLogger("etude.engine")


def make_decoder(policy: Policy, *, slots: int, deterministic: bool) -> Decoder:
    """Return the fastest decoder that is correct for the policy's architecture."""
    if deterministic and policy.device.type == "cpu":
        # With more threads, the order of additions would depend on the machine's load.
        torch.set_num_threads(1)
    if not takes_key_value_slots(policy.model):
        return RecomputeDecoder(policy, deterministic=deterministic)
    if deterministic or not fuses(policy):
        return SlotDecoder(policy, slots=slots, deterministic=deterministic)
    if policy.device.type != "cuda":
        return RaggedDecoder(policy, slots=slots)
    return tried_graph_decoder(policy) or SlotDecoder(policy, slots=slots, deterministic=False)


@torch.inference_mode()
def tried_graph_decoder(policy: Policy) -> GraphDecoder | None:
    """Return a decoder whose logits were compared with the model's; None, with a warning, if it is wrong."""
    try:
        decoder = GraphDecoder(policy)
        reason = decoder.why_wrong()
    except Exception as error:  # noqa: BLE001  the kernels of another release may fail in any way
        reason = error_words(error)
    if reason is None:
        return decoder
    _LOG.warning("tokens are sampled by the model's own modules, more slowly: %s", reason)
    return None


@dataclass(slots=True, eq=False)
class _Job:
    row: LiveRow
    request: ChatRequest
    limit: int
    """Number of tokens, prompt included, at which the row is cut."""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]


_News: TypeAlias = Delta | Completion | str
"""A token, the result, or an error message."""


class EmbeddedEngine(Engine, TokenEngine):
    """Batches concurrent requests continuously: they join and leave at any step.

    One thread runs the model, step after step, while there are requests. A request's tokens depend only on
    the weights, its prompt and its key, not on the rest of the batch; exactly so with `deterministic`.
    """

    def __init__(self, policy: Policy, *, max_tokens: int = 512, deterministic: bool = False) -> None:
        """`max_tokens` is for requests without any."""
        self.policy = policy
        self._max_tokens = max_tokens
        self._deterministic = deterministic
        self._decoder: Decoder | None = self._make_decoder()
        release_threads()
        policy.samplers.add(self)
        self._rests = False
        """Whether to drop the decoder as soon as there are no requests."""
        self._wake = threading.Condition()
        self._incoming: deque[_Job] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def codec(self) -> TextCodec:
        return self.policy.codec

    @property
    def version(self) -> int:
        return self.policy.version

    async def complete(self, request: ChatRequest) -> Completion:
        """Sample one assistant message, in a batch with other requests."""
        return await sample_message(self, request)

    async def sample(self, request: ChatRequest) -> Completion:
        sampling, length, make = request.sampling, len(request.prompt_ids), self.codec.grammars.shaper
        if sampling.constraint is None:
            shaper = make(sampling, request.prompt_ids)
        else:  # Compiling a grammar may take as long as sampling many tokens.
            shaper = await asyncio.to_thread(make, sampling, request.prompt_ids)
        wanted = self._max_tokens if sampling.max_tokens is None else sampling.max_tokens
        if sampling.min_tokens > wanted:
            raise ImpossibleCall(
                f"min_tokens is {sampling.min_tokens}, but the answer is cut after {wanted} tokens; ask for "
                "fewer, or for more max_tokens",
                param="min_tokens",
            )
        loop, uniform = asyncio.get_running_loop(), uniforms(request.seed)
        ids, limit = list(request.prompt_ids), min(length + wanted, self.policy.max_context)
        row = LiveRow(request.conversation, ids, sampling, uniform, top=request.top_logprobs, shaper=shaper)
        job = _Job(row, request, limit, loop, loop.create_future())
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
        """Load the weights of `version`; the next step samples from them."""
        await asyncio.to_thread(self.policy.adopt, version)

    async def close(self) -> None:
        """Stop the thread; unfinished requests fail."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._decoder = None  # A reference to the engine must not keep its keys and values.

    def free_sampling_memory(self) -> None:
        """Free the memory that only sampling needs. A GPU's is kept: allocating it takes long."""
        if self.policy.device.type != "cuda":
            with self._wake:
                self._rests = True
                self._wake.notify()

    def _make_decoder(self) -> Decoder:
        with self.policy.lock:
            self._weights_id = self.policy.weights_id
            # This many conversations keep their keys and values between two turns.
            return make_decoder(self.policy, slots=64, deterministic=self._deterministic)

    def _work(self) -> None:
        active: list[_Job] = []
        while self._admit(active):
            try:
                active = self._advance(active)
            except Exception as error:  # noqa: BLE001  after any failure, no request may be left waiting
                cause = f"the engine failed: {type(error).__name__}: {error}"
                reason = str(error) if isinstance(error, EngineError) else cause
                _hand_over([(job, reason) for job in active])
                self._decoder = None  # A failure half-way may leave it in any state.
                active = []
        with self._wake:
            active.extend(self._incoming)
            self._incoming.clear()
        _hand_over([(job, "the engine was closed") for job in active])

    def _admit(self, active: list[_Job]) -> bool:
        """Admit waiting requests, and sleep while there are none. Return False when the engine closes."""
        with self._wake:
            while not self._closed and not active and not self._incoming:
                if self._rests:
                    self._decoder, self._rests = None, False
                release_threads()
                self._wake.wait()
            most = self._decoder.most_rows if self._decoder else MOST_ROWS
            while self._incoming and len(active) < most:
                active.append(self._incoming.popleft())
            return not self._closed

    def _advance(self, active: list[_Job]) -> list[_Job]:
        """Run one step of the model; return the jobs that are neither finished nor cancelled."""
        decoder = self._decoder = self._decoder or self._make_decoder()
        cancelled = [job for job in active if job.future.cancelled()]
        for job in cancelled:
            decoder.release(job.row)
        alive = [job for job in active if job not in cancelled] if cancelled else active
        if not alive:
            return []
        with self.policy.lock:
            if self._weights_id != self.policy.weights_id:
                decoder.forget()
                self._weights_id = self.policy.weights_id
            grown = {id(row) for row in decoder.step([job.row for job in alive])}
            version = self.policy.version
        news: list[tuple[_Job, _News]] = []
        finished: set[_Job] = set()
        for job in alive:
            if id(job.row) not in grown:
                continue
            row = job.row
            end: Completion | str | None = None if row.shaper is None else row.shaper.fault or None
            if end is None:
                if job.request.on_delta is not None:
                    top = row.top_logprobs[-1] if row.top else ()
                    news.append((job, Delta(ids=(row.ids[-1],), logprobs=(row.logprobs[-1],), top=(top,))))
                end = self._result(job, version)
            if end is not None:
                news.append((job, end))
                finished.add(job)
                decoder.release(row)
        _hand_over(news)
        return [job for job in alive if job not in finished] if finished else alive

    def _result(self, job: _Job, version: int) -> Completion | None:
        """Return the result if the last token, sampled from weights of `version`, ends the job."""
        row, start = job.row, len(job.request.prompt_ids)
        ids, sampling = row.ids, row.sampling
        decode = self.policy.template.decode
        if ids[-1] in self.policy.stop_ids or ids[-1] in sampling.stop_token_ids:
            reason, text = "stop", decode(ids[start:-1])
        elif sampling.stop and (cut := _before_stop_string(ids[start:], sampling, decode)) is not None:
            reason, text = "stop", cut
        elif len(ids) >= job.limit:
            reason, text = "length", decode(ids[start:])
        else:
            return None
        return Completion(
            message={"role": "assistant", "content": text},
            finish_reason=reason,
            prompt_ids=tuple(ids[:start]),
            completion_ids=tuple(ids[start:]),
            logprobs=tuple(row.logprobs),
            top_logprobs=tuple(row.top_logprobs),
            usage=Usage(start, len(ids) - start),
            model_version=version,
        )


def _before_stop_string(sampled: Sequence[int], sampling: Sampling, decode: Decode) -> str | None:
    """Return the text before the first stop string, if one has appeared that may end the answer."""
    # A character has at most four tokens, so a stop string that has just appeared is in the tail.
    tail = decode(sampled[-4 * (max(map(len, sampling.stop)) + 1) :])
    if len(sampled) < sampling.min_tokens or not any(stop in tail for stop in sampling.stop):
        return None
    return before_stop(sampled, sampling.stop, sampling.min_tokens - 1, decode)


def _hand_over(news: Sequence[tuple[_Job, _News]]) -> None:
    """Pass tokens and results to the event loops that wait for them, with one wake-up per loop."""
    for loop in {job.loop for job, _ in news}:
        with suppress(RuntimeError):  # The loop is closed, and nobody waits any more.
            loop.call_soon_threadsafe(_receive, [(job, new) for job, new in news if job.loop is loop])


def _receive(news: Sequence[tuple[_Job, _News]]) -> None:
    for job, new in news:
        if job.future.done():
            continue
        if isinstance(new, str):
            job.future.set_exception(EngineError(new))
        elif isinstance(new, Completion):
            job.future.set_result(new)
        elif job.request.on_delta is not None:
            job.request.on_delta(new)

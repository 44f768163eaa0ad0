"""The engine for vLLM processes, one per device: token ids in, token ids out."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
from pydantic_core import from_json, to_json

from etude.core.call import ChatRequest, Completion, Delta, TopLogprobs, Usage
from etude.core.errors import EngineAway, EngineError, ImpossibleCall
from etude.engines.answer import before_stop, sample_message
from etude.engines.http_client import HttpClient
from etude.engines.vllm_process import VllmProcess
from etude.models.text_codec import TextCodec
from etude.wire.client import (
    FIRST_TOKENS,
    Choice,
    beginning_digest,
    conversation_key,
    read_answer,
    sampling_fields,
)
from etude.wire.retries import Retryable


class VllmProcesses:
    """Processes with the same model and LoRA weights; a conversation stays at one while that one runs.

    Each process is watched and restarted separately. It gets no calls during a restart.
    """

    def __init__(self, processes: Sequence[VllmProcess]) -> None:
        """If there are several processes, none may have been started: they will share a key."""
        self.processes = tuple(processes)
        for process in self.processes[1:]:
            process.key, process.changed = self.processes[0].key, self.processes[0].changed
        self._homes: dict[str, VllmProcess] = {}
        """The process of each conversation, least recently used first."""
        self._turn = 0
        self._source = ""

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that requests to any process need."""
        return self.processes[0].headers

    async def start(self, source: str, *, in_place: bool = False) -> None:
        """Serve `source`; return once requests are answered.

        With `in_place`, running processes load the weights without a restart, if they can. The weights must
        have the same shapes, and no request may be running. Raises EngineError if a process does not start,
        and then stops the others.
        """
        if source == self._source:
            await self._wait_for_ready(self.processes[0].options.start_seconds)
            return
        self._source = ""
        starts = (each.change_to(source) if in_place else each.start(source) for each in self.processes)
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        if failures := [outcome for outcome in outcomes if outcome is not None]:
            await self.stop()
            raise failures[0]
        self._source = source

    async def stop(self) -> None:
        """End all processes and forget their LoRA weights."""
        self._source = ""
        await asyncio.gather(*(process.stop() for process in self.processes))

    async def add_lora(self, name: str, folder: Path) -> None:
        """Load LoRA weights under a name never used before, in every process that runs.

        Raises EngineError if one of them refuses, or none runs.
        """
        loads = (process.add_lora(name, folder) for process in self.processes)
        outcomes = await asyncio.gather(*loads, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures or True not in outcomes:
            await self.remove_lora(name)
            raise next(iter(failures), EngineError("vLLM is not running"))

    async def remove_lora(self, name: str) -> None:
        """Unload LoRA weights everywhere; ignore those that are not loaded."""
        await asyncio.gather(*(process.remove_lora(name) for process in self.processes))

    async def choose(
        self, conversation: str, seconds: float, avoid: Collection[VllmProcess] = ()
    ) -> VllmProcess:
        """Return the process for a call of a conversation: its own if that is ready, else the next in turn.

        Processes in `avoid`, where the same call has failed, are used last. Waits until one is ready. Raises
        EngineAway if none is ready in time, or none is starting.
        """
        ready = await self._wait_for_ready(seconds)
        usable = [process for process in ready if process not in avoid] or ready
        process = self._homes.pop(conversation, None)
        if process not in usable:
            process = usable[self._turn % len(usable)]
            self._turn += 1
        self._homes[conversation] = process
        if len(self._homes) > 2**17:  # The least recently used one may move.
            del self._homes[next(iter(self._homes))]
        return process

    def status(self) -> dict[str, Any]:
        """Return the state of the processes, as fields of `GET /engine/status`."""
        states = [process.state for process in self.processes]
        together: dict[str, Any] = {
            "process": "running" if "running" in states else states[0],
            "restarts": sum(process.restarts for process in self.processes),
            "reason": next((process.reason for process in self.processes if process.reason), None),
        }
        if len(self.processes) > 1:
            together["processes"] = [
                {
                    "device": process.options.device,
                    "node": process.where,
                    "process": process.state,
                    "restarts": process.restarts,
                    "reason": process.reason or None,
                    "answers": process.answered,
                    "failed": process.failed,
                }
                for process in self.processes
            ]
        return together

    async def _wait_for_ready(self, seconds: float) -> list[VllmProcess]:
        """Wait until a process is ready, and return all that are. Raises EngineAway."""
        changed = self.processes[0].changed
        try:
            async with asyncio.timeout(seconds):
                while not (ready := self.ready()):
                    if all(process.state in ("stopped", "failed") for process in self.processes):
                        raise EngineAway("vLLM is not running; /engine/status says why")
                    async with changed:
                        await changed.wait()
        except TimeoutError as error:
            raise EngineAway(f"vLLM is not back after {seconds:g} s; /engine/status says why") from error
        return ready

    def ready(self) -> list[VllmProcess]:
        """Return the processes that can take requests now."""
        return [process for process in self.processes if process.state == "running"]


_PLAIN_SAMPLING = {
    **{"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0},
}
"""Passed explicitly, because vLLM would otherwise take them from the model's generation config."""


@dataclass(eq=False)
class VllmEngine:
    """One model of vLLM processes: the base model that they serve, or LoRA weights on it."""

    processes: VllmProcesses
    name: str
    """vLLM's name for the model."""
    codec: TextCodec
    max_tokens: int
    wait: float
    """Seconds that a request waits at most for a process."""
    version: int = 0

    def __post_init__(self) -> None:
        # An answer of 100,000 tokens, each with the 20 likeliest, takes fewer megabytes.
        self._client = HttpClient(self.processes.headers, read_seconds=600.0, megabytes=512.0)

    async def sample(self, request: ChatRequest) -> Completion:
        """Continue a prompt of token ids; wait first if vLLM is restarting.

        The logprobs belong to the distribution that was sampled from, with temperature and top_p applied.
        """
        form, tried = dict[str, Any](), set[VllmProcess]()
        if (constraint := request.sampling.constraint) is not None:
            # The learner masks the same distribution with the same grammar. Compiling it shows whether it
            # exists, and may take as long as sampling many tokens.
            text = await asyncio.to_thread(self.codec.grammars.text, constraint, request.prompt_ids)
            form = {"structured_outputs": {"grammar": text}}
        conversation = request.conversation
        if not conversation and len(self.processes.processes) > 1:
            conversation = beginning_digest(request.prompt_ids[:FIRST_TOKENS])
        # A stream costs vLLM and this process several times as much, so only requests with a listener get
        # one.
        body = self._body(request) | form | {"stream": request.on_delta is not None}
        while True:
            process = await self.processes.choose(conversation, self.wait, tried)
            named, heard = body | {"model": process.served_name(self.name)}, list[int]()
            try:
                completion = await self._sample_at(request, process.base_url, named, heard)
            except EngineAway:
                process.failed += 1
                tried.add(process)
                # A listener that has received tokens cannot be sent others.
                if (heard and request.on_delta) or tried.issuperset(self.processes.ready()):
                    raise
            else:
                process.answered += 1
                return completion

    async def _sample_at(
        self, request: ChatRequest, url: str, body: Mapping[str, Any], ids: list[int]
    ) -> Completion:
        """Sample the continuation at the process with this `url`; its tokens are added to `ids`."""
        logprobs, tops = list[float](), list[TopLogprobs]()
        finish_reason = ""
        async for choice in self._choices(url, body):
            new, own, best = self._read(choice, request)
            ids += new
            logprobs += own
            tops += best
            if request.on_delta is not None:
                for token, logprob, top in zip(new, own, best or [()] * len(new), strict=True):
                    request.on_delta(Delta(ids=(token,), logprobs=(logprob,), top=(top,)))
            finish_reason = choice.get("finish_reason") or finish_reason
        if not finish_reason:
            raise EngineError("vLLM ended its answer too early")
        ends = {*self.codec.stop_ids, *request.sampling.stop_token_ids}
        said, sampling = ids[:-1] if ids and ids[-1] in ends else ids, request.sampling
        decode = self.codec.template.decode
        cut = before_stop(said, sampling.stop, sampling.min_tokens, decode)
        return Completion(
            message={"role": "assistant", "content": decode(said) if cut is None else cut},
            finish_reason="length" if finish_reason == "length" else "stop",
            prompt_ids=request.prompt_ids,
            completion_ids=tuple(ids),
            logprobs=tuple(logprobs),
            top_logprobs=tuple(tops),
            usage=Usage(len(request.prompt_ids), len(ids)),
            model_version=self.version,
        )

    async def complete(self, request: ChatRequest) -> Completion:
        """Sample one assistant message. Raises EngineError."""
        if len(self.processes.processes) > 1:
            request = replace(request, conversation=conversation_key(request))
        return await sample_message(self, request)

    async def close(self) -> None:
        """Close all connections; vLLM then cancels their requests."""
        await self._client.close()

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        sampling, room = request.sampling, self.codec.max_context - len(request.prompt_ids)
        wanted = self.max_tokens if sampling.max_tokens is None else sampling.max_tokens
        return _PLAIN_SAMPLING | {
            "prompt": list(request.prompt_ids),
            "max_tokens": min(wanted, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request.seed % 2**63,
            "stop": list(sampling.stop),
            **sampling_fields(sampling if not sampling.constraint else replace(sampling, constraint=None)),
            "stop_token_ids": sorted({*self.codec.stop_ids, *sampling.stop_token_ids}),
            "logprobs": request.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    async def _choices(self, base_url: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the only choice, in pieces if it is streamed. Raises EngineError for any failure."""
        url, content = f"{base_url}/v1/completions", to_json(body)
        try:
            async with self._client.stream_post(url, content) as (response, pieces):
                if response.status != httpx.codes.OK:
                    content = b"".join([piece async for piece in pieces])
                    reason = f"vLLM answered {response.status}: {content.decode('utf-8', 'replace')[:300]}"
                    # After its engine has died, vLLM answers 500 to all requests until it ends.
                    if response.status >= 500:
                        raise EngineAway(reason)
                    raise ImpossibleCall(reason) if response.status in (400, 422) else EngineError(reason)
                if not body["stream"]:
                    yield from_json(b"".join([piece async for piece in pieces]))["choices"][0]
                    return
                rest = b""
                async for piece in pieces:
                    *lines, rest = (rest + piece).split(b"\n")
                    for choice in chain.from_iterable(map(_streamed_choices, lines)):
                        yield choice
        except httpx.HTTPError as error:
            raise EngineAway(f"vLLM went away: {type(error).__name__}") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise _unreadable(error) from error

    def _read(
        self, choice: Mapping[str, Any], request: ChatRequest
    ) -> tuple[Sequence[int], Sequence[float], Sequence[TopLogprobs]]:
        """Return a piece's new tokens, their logprobs, and the likeliest there. Raises EngineError."""
        try:
            read = read_answer(Choice, choice)
            ids, logprobs = read.sampled_tokens()
            if len(ids or ()) != len(logprobs or ()):
                raise ValueError("it has tokens without logprobs")
            if ids and max(ids) >= self.codec.vocabulary:
                raise ValueError(f"token id {max(ids)} is beyond the vocabulary of {self.codec.vocabulary}")
            return ids or (), logprobs or (), read.tops(request.top_logprobs)
        except (Retryable, ValueError) as error:
            raise _unreadable(error) from error


def _streamed_choices(line: bytes) -> Iterator[dict[str, Any]]:
    """Yield the choices in a line of a stream of events. Raises EngineError if vLLM sent an error."""
    data = line.removeprefix(b"data:").strip()
    if line.startswith(b"data:") and data != b"[DONE]":
        chunk = from_json(data)
        if "error" in chunk:
            raise EngineError(f"vLLM failed: {str(chunk['error'])[:300]}")
        yield from chunk["choices"]


def _unreadable(error: Exception) -> EngineError:
    return EngineError(f"vLLM's answer cannot be read: {type(error).__name__}: {error}")

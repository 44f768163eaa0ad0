"""The engine for vLLM processes: token ids in, token ids out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
from pydantic_core import from_json, to_json

from etude.core.call import ChatRequest, Completion, Delta, TopLogprobs, Usage
from etude.core.errors import EngineAway, EngineError, ImpossibleCall
from etude.engines.answer import before_stop, sample_message
from etude.engines.http_client import HttpClient
from etude.engines.vllm_process import VllmProcess
from etude.engines.vllm_processes import VllmProcesses
from etude.models.text_codec import TextCodec
from etude.wire.answers import BadAnswer, read_tops
from etude.wire.client import (
    FIRST_TOKENS,
    as_chat,
    beginning_digest,
    conversation_key,
    read_tokens,
    sampling_fields,
)

_PLAIN_SAMPLING = {
    **{"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0},
}
"""Passed explicitly, because vLLM would otherwise take them from the model's generation config."""


class VllmEngine:
    """One model of vLLM processes: the base model that they serve, or LoRA weights on it."""

    def __init__(
        self,
        processes: VllmProcesses,
        name: str,
        codec: TextCodec,
        *,
        max_tokens: int,
        wait: float,
        version: int = 0,
    ) -> None:
        """`name` is vLLM's name for the model. A request waits up to `wait` seconds for a process."""
        self.codec = codec
        self.version = version
        self._processes = processes
        self._name = name
        self._max_tokens = max_tokens
        self._wait = wait
        # An answer of 100,000 tokens, each with the 20 likeliest, takes fewer megabytes.
        self._client = HttpClient(processes.headers, read_seconds=600.0, megabytes=512.0)

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
        if not conversation and len(self._processes.processes) > 1:
            conversation = beginning_digest(request.prompt_ids[:FIRST_TOKENS])
        # A stream costs vLLM and this process several times as much, so only requests with a listener get
        # one.
        body = self._body(request) | form | {"stream": request.on_delta is not None}
        heard = 0

        def note_token(token: Delta) -> None:
            nonlocal heard
            assert request.on_delta is not None
            heard += 1
            request.on_delta(token)

        while True:
            process = await self._processes.choose(conversation, self._wait, tried)
            named = body | {"model": process.served_name(self._name)}
            try:
                listener = None if request.on_delta is None else note_token
                completion = await self._sample_at(request, process.base_url, named, listener)
            except EngineAway:
                process.failed += 1
                tried.add(process)
                # A listener that has received tokens cannot be sent others.
                if heard or not self._processes.has_other(tried):
                    raise
            else:
                process.answered += 1
                return completion

    async def _sample_at(
        self,
        request: ChatRequest,
        url: str,
        body: Mapping[str, Any],
        on_delta: Callable[[Delta], None] | None,
    ) -> Completion:
        """Sample the continuation at the process with this `url`."""
        ids, logprobs, tops = list[int](), list[float](), list[TopLogprobs]()
        finish_reason = ""
        async for choice in self._choices(url, body):
            new, own, best = self._read(choice, request)
            ids += new
            logprobs += own
            tops += best
            if on_delta is not None:
                for token, logprob, top in zip(new, own, best or [()] * len(new), strict=True):
                    on_delta(Delta(ids=(token,), logprobs=(logprob,), top=(top,)))
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
        if len(self._processes.processes) > 1:
            request = replace(request, conversation=conversation_key(request))
        return await sample_message(self, request)

    async def close(self) -> None:
        """Close all connections; vLLM then cancels their requests."""
        await self._client.close()

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        sampling, room = request.sampling, self.codec.max_context - len(request.prompt_ids)
        wanted = self._max_tokens if sampling.max_tokens is None else sampling.max_tokens
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
            async with self._client.asked("POST", url, content) as (response, pieces):
                if response.status != httpx.codes.OK or not body["stream"]:
                    whole = b"".join([piece async for piece in pieces])
                    if response.status != httpx.codes.OK:
                        raise _failure(response.status, whole)
                    yield from_json(whole)["choices"][0]
                    return
                rest = b""
                async for piece in pieces:
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        data = line.removeprefix(b"data:").strip()
                        if not line.startswith(b"data:") or data == b"[DONE]":
                            continue
                        chunk = from_json(data)
                        if "error" in chunk:
                            raise EngineError(f"vLLM failed: {str(chunk['error'])[:300]}")
                        for choice in chunk["choices"]:
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
            tokens = (as_chat(choice)["logprobs"] or {"content": ()})["content"]
            ids, logprobs = read_tokens(choice, tokens, self.codec.vocabulary)
            if len(ids or ()) != len(logprobs or ()):
                raise ValueError("it has tokens without logprobs")
            most = request.top_logprobs
            return ids or (), logprobs or (), read_tops(tokens, most) if most else ()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(error) from error


def _failure(status: int, body: bytes) -> EngineError:
    reason = f"vLLM answered {status}: {body.decode('utf-8', 'replace')[:300]}"
    # After its engine has died, vLLM answers 500 to all requests until it ends.
    if status >= 500:
        return EngineAway(reason)
    return ImpossibleCall(reason) if status in (400, 422) else EngineError(reason)


def _unreadable(error: Exception) -> EngineError:
    reason = str(error) if isinstance(error, BadAnswer) else f"{type(error).__name__}: {error}"
    return EngineError(f"vLLM's answer cannot be read: {reason}")

"""A `vllm serve` without a model: it gives the same answer of 32 tokens to every request, at once.

Started by `etude serve --engine vllm --vllm-command`, so that what is left to measure is the server. It
answers in vLLM's wire format at `/v1/completions`, as the server asks it, and at `/v1/chat/completions`, for
clients that ask it themselves. It takes 0.1 ms of CPU for a request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

TOKENS = 32
"""Tokens of the answer."""
_PROMPT = 24
"""Tokens of every prompt in the answers to chats."""
_IDS = [20 + place for place in range(TOKENS)]
_LOGPROBS = [-0.015625 * (1 + place) - 1e-9 * place for place in range(TOKENS)]


def _answer(kind: str, choice: dict[str, Any]) -> bytes:
    body = {
        "id": "cmpl-8b0c4f6e5d3a4c0f9d5f7a2b1c3d4e5f",
        "object": kind,
        "created": 1_700_000_000,
        "model": "canned",
        "choices": [{"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": _IDS} | choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": _PROMPT,
            "total_tokens": _PROMPT + TOKENS,
            "completion_tokens": TOKENS,
            "prompt_tokens_details": None,
        },
        "kv_transfer_params": None,
    }
    return _reply(json.dumps(body, separators=(",", ":")).encode())


def _reply(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ndate: Mon, 23 Nov 2026 10:00:00 GMT\r\nserver: uvicorn\r\n"
    return head + b"content-length: %d\r\ncontent-type: application/json\r\n\r\n%b" % (len(body), body)


def _completion() -> bytes:
    names = [f"token_id:{token}" for token in _IDS]
    logprobs = {
        "text_offset": [0] * TOKENS,
        "token_logprobs": _LOGPROBS,
        "tokens": names,
        "top_logprobs": [{name: value} for name, value in zip(names, _LOGPROBS, strict=True)],
    }
    ids = {"prompt_logprobs": None, "prompt_token_ids": list(range(_PROMPT))}
    return _answer("text_completion", {"text": "it is 3. " * 8, "logprobs": logprobs} | ids)


def _chat() -> bytes:
    content = [
        {"token": "it", "logprob": value, "bytes": [105, 116], "top_logprobs": []} for value in _LOGPROBS
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "it is 3. " * 8,
        "refusal": None,
        "tool_calls": [],
    }
    return _answer("chat.completion", {"message": message, "logprobs": {"content": content}})


_ANSWERS = {"/v1/completions": _completion(), "/v1/chat/completions": _chat()}


class _Connection(asyncio.Protocol):
    """Just enough of HTTP/1.1 for a client that sends one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if len(rest) < (int(lengths[0].partition(b":")[2]) if lengths else 0):
            return
        self._received = b""
        self._transport.write(_ANSWERS.get(head.split(b" ", 2)[1].decode(), _reply(b"{}")))


async def _serve(host: str, port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, host, port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    known, _ = parser.parse_known_args()
    asyncio.run(_serve(known.host, known.port))

"""A model that answers at once, in this process and behind HTTP.

It stands in for a model, so that what is left to measure is the harness. It speaks in words like `w17`, and a
word is a token: prompts of a conversation extend each other token for token, as a real engine's do. An
answer has 32 tokens with their logprobs.

Run as a script it is an HTTP server that speaks OpenAI's chat completions, with token ids as vLLM gives
them; it prints its port. It is a process of its own so that its work is not counted as the harness's. With a
number of seconds as argument it takes so long to answer on average, each request between half and one and a
half of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from etude.core.call import ChatRequest, Completion, Usage
from etude.core.job import ModelVersion

TOKENS = 32
"""Tokens of an answer, the end of turn included."""

START, END, FIRST_WORD = 1, 2, 10

Message = dict[str, Any]


def words(start: int, count: int) -> str:
    """`count` words that follow from `start`."""
    return " ".join([f"w{(start * 31 + place * 17) % 990}" for place in range(count)])


def tokens_of(text: str) -> list[int]:
    """A token for each word."""
    return [FIRST_WORD + int(word[1:]) for word in text.split()]


def prompt_tokens(messages: Sequence[Message]) -> list[int]:
    """The whole prompt, up to the point where the assistant is to speak."""
    ids: list[int] = []
    for message in messages:
        ids += (START, *tokens_of(message["content"]), END)
    return [*ids, START]


def answer_text(seed: int) -> str:
    """The answer to a request of this seed."""
    return words(seed, TOKENS - 1)


def logprobs() -> list[float]:
    """Any numbers: nothing here looks at them."""
    return [-0.015625 * (1 + place) for place in range(TOKENS)]


class StubEngine:
    """Answers at once, in this process."""

    version = 0

    async def complete(self, request: ChatRequest) -> Completion:
        """An answer that follows from the request's key."""
        text = answer_text(request.key % 1000)
        prompt_ids = prompt_tokens(request.messages)
        return Completion(
            message={"role": "assistant", "content": text},
            prompt_ids=tuple(prompt_ids),
            completion_ids=(*tokens_of(text), END),
            logprobs=tuple(logprobs()),
            usage=Usage(len(prompt_ids), TOKENS),
        )

    async def adopt(self, version: ModelVersion) -> None:
        """There are no weights."""

    async def close(self) -> None:
        """There is nothing to free."""


@contextmanager
def running_server() -> Iterator[str]:
    """The base URL of a server in another process."""
    with server_process() as (url, _):
        yield url


@contextmanager
def server_process(seconds: float = 0.0) -> Iterator[tuple[str, Popen[str]]]:
    """The base URL of a server in another process, and that process; an answer takes `seconds` on average."""
    with Popen([sys.executable, str(Path(__file__)), str(seconds)], stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1", process
        finally:
            process.terminate()


class _Connection(asyncio.Protocol):
    """Just enough of HTTP/1.1 for a client that sends one request at a time on each connection."""

    seconds = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = next(
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        )
        if len(rest) < length:
            return
        self._received = rest[length:]
        request = json.loads(rest[:length])
        if self.seconds:
            # The same for a request whenever it is made, so that the same episodes take the same time.
            wait = self.seconds * (0.5 + request["seed"] % 1000 / 1000)
            asyncio.get_running_loop().call_later(wait, self._answer, request)
        else:
            self._answer(request)

    def _answer(self, request: dict[str, Any]) -> None:
        body = _chat_completion(request)
        answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        self._transport.write(answer + body)


def _chat_completion(request: dict[str, Any]) -> bytes:
    text = answer_text(request["seed"] % 1000)
    prompt_ids = prompt_tokens(request["messages"])
    content: list[Message] = [
        {"token": word, "logprob": logprob, "bytes": None, "top_logprobs": []}
        for word, logprob in zip([*text.split(), "<end>"], logprobs(), strict=True)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": []},
        "finish_reason": "stop",
        "logprobs": {"content": content},
        "token_ids": [*tokens_of(text), END],
    }
    reply = {
        "id": "chatcmpl-stub",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": TOKENS,
            "total_tokens": len(prompt_ids) + TOKENS,
        },
        "prompt_token_ids": prompt_ids,
    }
    return json.dumps(reply).encode()


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    _Connection.seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
    asyncio.run(_serve())

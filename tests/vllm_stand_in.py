"""Stands in for `vllm serve`, which is too large to be installed for every test.

It speaks vLLM's wire format and answers with a real model. With `--echo` it answers at once with one token;
with `--slow` it never starts or listens to SIGTERM; with `--dying` it fails at the first request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

FIELDS = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "logprobs", "stream"),
    *("frequency_penalty", "presence_penalty", "logit_bias", "top_k", "min_p", "min_tokens"),
    *("repetition_penalty", "stop_token_ids", "structured_outputs"),
    *("return_token_ids", "return_tokens_as_token_ids"),
}
"""As `CompletionRequest` of vLLM 0.26 has them, which ignores others."""


PLAIN = (*("top_k", "min_p", "min_tokens"), *("frequency_penalty", "presence_penalty", "repetition_penalty"))


ECHO = {
    **{"index": 0, "text": "", "finish_reason": "stop", "token_ids": [1]},
    "logprobs": {"tokens": ["token_id:1"], "token_logprobs": [-0.5], "top_logprobs": [{}]},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    for option in ("--host", "--port", "--dtype", "--middleware"):
        parser.add_argument(option)
    given, others = parser.parse_known_args()
    if "--fail" in others:
        sys.exit("RuntimeError: no room for the KV cache")
    if "--slow" in others:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    uvicorn.run(
        make_app(given.model, set(others)), host=given.host, port=int(given.port), log_level="warning"
    )


def make_app(source: str, options: set[str]) -> FastAPI:
    asked: list[Any] = []
    silent, dying = bool({"--dying", "--echo"} & options), "--dying" in options
    refused = ""
    app, engines = FastAPI(), {source: None if silent else make_engine(source)}
    hanging = asyncio.Event()

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        wanted = f"Bearer {os.environ['VLLM_API_KEY']}"
        if request.url.path.startswith("/v1") and request.headers.get("authorization") != wanted:
            return JSONResponse({"error": "Unauthorized"}, 401)
        answer: Response = await call_next(request)
        return answer

    @app.get("/health")
    async def health() -> Response:
        if hanging.is_set():
            await asyncio.Event().wait()
        return Response()

    @app.post("/hang")
    async def hang() -> None:
        hanging.set()

    @app.post("/refuse")
    async def refuse(body: dict[str, str]) -> None:
        """Take no LoRA weights, for a reason."""
        nonlocal refused
        refused = body["reason"]

    @app.post("/collective_rpc")
    async def reload_weights(body: dict[str, Any]) -> Response:
        """As vLLM 0.32 does: of what it does not load only its log tells."""
        assert body["method"] == "reload_weights"
        unloaded = load_in_place(engines, source, Path(body["kwargs"]["weights_path"]), silent)
        for kind in unloaded:
            sys.stderr.write(f"WARNING 11-22 20:59:58 [layerwise.py:266] {kind}: Failed to load weights\n")
        sys.stderr.flush()
        return JSONResponse({"results": [None]})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        return JSONResponse({"success": True})

    @app.post("/v1/load_lora_adapter")
    async def load(body: dict[str, str]) -> Response:
        name, folder = body["lora_name"], body["lora_path"]
        if refused:
            return JSONResponse({"error": {"message": refused}}, 500)
        if name in engines:
            return JSONResponse({"error": {"message": f"{name} has already been loaded"}}, 400)
        if not Path(folder).is_absolute() or not (Path(folder) / "adapter_config.json").exists():
            return JSONResponse({"error": {"message": f"no adapter at {folder}"}}, 404)
        engines[name] = None if silent else make_engine(source, folder)
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: dict[str, str]) -> Response:
        if body["lora_name"] not in engines:
            return JSONResponse({"error": {"message": "cannot be found"}}, 404)
        engines.pop(body["lora_name"])
        return Response("Success")

    @app.get("/asked")
    async def last_asked() -> Any:
        return asked[-1]

    @app.get("/environment")
    async def environment() -> dict[str, str]:
        return dict(os.environ)

    @app.post("/v1/completions")
    async def complete(body: dict[str, Any]) -> Response:
        asked.append(body)
        if unknown := body.keys() - FIELDS:
            return JSONResponse({"error": {"message": f"fields that vLLM ignores: {unknown}"}}, 400)
        if dying:
            sys.stderr.write("(EngineCore pid=7) ERROR 11-22 ValueError: head_dim 16 is not supported\n")
            sys.stderr.flush()
            asyncio.get_running_loop().call_later(0.1, os._exit, 0)
            return JSONResponse({"error": {"message": "EngineCore encountered an issue"}}, 500)
        if body["model"] not in engines:
            return JSONResponse({"error": {"message": f"The model {body['model']} does not exist."}}, 404)
        if "--echo" in options:
            return JSONResponse({"choices": [ECHO]})
        pieces = chunks(engines[body["model"]], body)
        if body["stream"]:
            return StreamingResponse(map_lines(pieces), media_type="text/event-stream")
        return JSONResponse({"choices": [whole([piece async for piece in pieces])]})

    return app


def load_in_place(engines: dict[str, Any], name: str, folder: Path, silent: bool) -> list[str]:
    """Give a model other weights; the kinds of layers that did not get theirs."""
    if json.loads((folder / "config.json").read_text())["tie_word_embeddings"]:
        return ["RotaryEmbedding", "ParallelLMHead"]
    engines[name] = None if silent else make_engine(str(folder))
    return ["RotaryEmbedding"]


def make_engine(source: str, lora: str | None = None) -> Any:
    import torch
    from peft import PeftModel

    from etude.engines.embedded import EmbeddedEngine
    from etude.models.policy import Policy

    policy = Policy.load(source)
    if lora is not None:
        model = PeftModel.from_pretrained(policy.model, lora)
        policy = Policy(model, policy.tokenizer, source, torch.device("cpu"))
    return EmbeddedEngine(policy)


async def chunks(engine: Any, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    from etude.core.call import ChatRequest, Sampling

    queue: asyncio.Queue[Any] = asyncio.Queue()
    sampling = Sampling(
        body["temperature"],
        body["top_p"],
        body["max_tokens"],
        tuple(body["stop"]),
        **{name: body[name] for name in PLAIN if name in body},
        stop_token_ids=tuple(body["stop_token_ids"]),
        logit_bias=tuple((int(token), bias) for token, bias in body.get("logit_bias", {}).items()),
    )
    wanted = {"top_logprobs": body["logprobs"] + 1, "on_delta": queue.put_nowait}
    request = ChatRequest((), (), sampling, body["seed"], prompt=tuple(body["prompt"]), **wanted)
    task = asyncio.ensure_future(engine.sample(request))
    task.add_done_callback(lambda done: queue.put_nowait(None))
    while (token := await queue.get()) is not None:
        yield make_choice(token)
    yield make_choice(None, (await task).finish_reason)


async def map_lines(pieces: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    async for piece in pieces:
        yield f"data: {json.dumps({'object': 'text_completion', 'choices': [piece]})}\n\n"
    yield "data: [DONE]\n\n"


def make_choice(token: Any, finish_reason: str | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": finish_reason}
    choice |= {"token_ids": [], "logprobs": None}
    if token is not None:
        choice["token_ids"] = token.ids
        choice["logprobs"] = {
            "tokens": [f"token_id:{token.ids[0]}"],
            "token_logprobs": token.logprobs,
            "top_logprobs": [{f"token_id:{other}": logprob for other, logprob in token.top[0]}],
        }
    return choice


def whole(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """The pieces of a stream as one choice."""
    told = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    names = ("tokens", "token_logprobs", "top_logprobs")
    return pieces[-1] | {
        "token_ids": [token for piece in pieces for token in piece["token_ids"]],
        "logprobs": {name: [value for one in told for value in one[name]] for name in names},
    }


if __name__ == "__main__":
    main()

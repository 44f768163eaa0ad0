"""Requests that no client should send, for every route: deep, huge, of wrong types, with half characters.

No answer to any of them may be a failure of the server's, and none may take it down.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

DEEP = 900
FAR = 100_000
SURROGATES = ("\ud800", "\udc00", "a\udfffb")
NUMBERS = (
    *(1e-320, 5e-324, 1e-45, 1e-7, 1e308, -1e308, 1e38, 1e19, -1, -0.0, 0, 2**31, 2**63, 2**64, 10**400),
    *(float("nan"), float("inf"), float("-inf")),
)
WRONG = (True, False, "5", "", "x", [], ["a"], [[]], {}, {"a": 1}, 1.5, -1, 0)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


@dataclass(frozen=True, slots=True)
class Case:
    """One request."""

    name: str
    path: str
    body: bytes
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})


def find_problem(http: httpx.Client, case: Case) -> str | None:
    """Send a request; why the answer is not as it should be, or None where it is."""
    where = f"{case.name} at {case.path}"
    try:
        answer = http.request(case.method, case.path, content=case.body, headers=dict(case.headers))
    except httpx.HTTPError as error:
        return f"{where}: {error!r}"
    if answer.status_code >= 500 or '"server_error"' in answer.text:
        return f"{where}: {answer.status_code} {answer.text[:300]}"
    try:
        is_told = answer.status_code < 400 or answer.json()["error"].keys() >= {"message", "type"}
    except (ValueError, KeyError, AttributeError):
        is_told = False
    return None if is_told else f"{where}: {answer.status_code} without an error object"


def some(cases: Sequence[Case], each: int) -> list[Case]:
    """The first case of each name, wherever it is sent, and one of so many of the others."""
    first = {case.name: case for case in reversed(cases)}
    named = [case for case in first.values() if "=" not in case.name]
    return [*named, *cases[::each]]


def gateway_cases(model: str) -> list[Case]:
    """For the APIs that the server and an episode's endpoint share."""
    bodies = _bodies(model)
    cases = []
    for path, good in bodies.items():
        where = f"/v1{path}"
        cases += [Case(name, where, body) for name, body in _texts().items()]
        cases += [Case(f"field {name}", where, body) for name, body in _with_deep_fields(good)]
        cases += [Case(f"{name}", where, body) for name, body in _with_wrong_fields(path, good)]
    messages = bodies["/chat/completions"]["messages"]
    for name, body in _conversations(messages):
        chat = bodies["/chat/completions"] | body
        cases.append(Case(name, "/v1/chat/completions", _json(chat)))
        cases.append(Case(f"{name}, streamed", "/v1/chat/completions", _json(chat | {"stream": True})))
    long = {"role": "user", "content": "yes or no? " * 20_000}
    cases += [
        Case("a prompt that is too long", "/v1/responses", _json({"model": model, "input": [long]})),
        Case("a prompt that is too long", "/v1/messages", _json(bodies["/messages"] | {"messages": [long]})),
    ]
    return cases


def server_cases(model: str) -> list[Case]:
    """For the routes that only the server has."""
    posts = {"/v1/fine_tuning/jobs": {"model": model, "training_file": "file-x"}}
    cases = []
    for path, good in posts.items():
        cases += [Case(name, path, body) for name, body in _texts().items()]
        cases += [Case(f"field {name}", path, body) for name, body in _with_deep_fields(good)]
        cases += [
            Case(f"{name}={value!r:.20}", path, _json(good | {name: value}))
            for name in good
            for value in (*WRONG[::3], None, 1e-320, *SURROGATES[:1])
        ]
    for path in ("/v1/models/%ed%a0%80", "/v1/files/%00", "/v1/fine_tuning/jobs/%ff/events", "/v1/%2e%2e/x"):
        cases += [Case("an odd path", path, b"", method) for method in ("GET", "DELETE", "POST", "PUT")]
    for query in ("limit=99999999999999999999", "after=%ed%a0%80", "order=%00", "metadata[%ff]=%00"):
        cases += [Case("an odd query", f"/v1/{what}?{query}", b"", "GET") for what in ("files", "models")]
        cases.append(Case("an odd query", f"/v1/fine_tuning/jobs?{query}", b"", "GET"))
    return cases


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


def nest(levels: int, leaf: Any = 1) -> Any:
    """Objects in one another."""
    value = leaf
    for _ in range(levels):
        value = {"properties": value}
    return value


def _texts() -> dict[str, bytes]:
    """Bodies that are no requests at all."""
    return {
        "nothing": b"",
        "half": b'{"model": "x"',
        "no object": b"[]",
        "a text": b'"x"',
        "null": b"null",
        "no text": b"\xff\xfe\x00",
        "deep lists": b"[" * FAR,
        "deep and closed": b"[" * FAR + b"]" * FAR,
        "deep objects": b'{"a":' * FAR,
        "a surrogate for a key": b'{"\\ud800": 1}',
        "a number without end": b'{"model": 1' + b"0" * 5000 + b"}",
        "not a number": b'{"model": NaN}',
        "many values": b"[" + b"0," * 2_100_000 + b"0]",
        "the same name often": b"{" + b'"model": "x",' * 1000 + b'"model": "x"}',
    }


def _with_deep_fields(good: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    for name in good:
        yield f"{name}, 900 deep", _json(good).replace(b"{", b'{"%s": %s, ' % (name.encode(), _deep()), 1)
    yield "unknown, 900 deep", _json(good).replace(b"{", b'{"unknown": %s, ' % _deep(), 1)
    for half in SURROGATES:
        yield f"with {half!r}", _json({**good, "model": half, "user": half})


def _deep() -> bytes:
    return b'{"properties": ' * DEEP + b"1" + b"}" * DEEP


def _bodies(model: str) -> dict[str, dict[str, Any]]:
    """Requests that are good, by path."""
    asked = [{"role": "user", "content": "yes?"}]
    return {
        "/chat/completions": {"model": model, "messages": asked, "max_tokens": 2},
        "/completions": {"model": model, "prompt": "yes?", "max_tokens": 2},
        "/responses": {"model": model, "input": "yes?", "max_output_tokens": 2},
        "/messages": {"model": model, "messages": asked, "max_tokens": 2},
        "/messages/count_tokens": {"model": model, "messages": asked},
    }


_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_COUNTS = ("max_tokens", "max_completion_tokens", "n", "top_k", "min_tokens", "seed", "top_logprobs")
_OTHERS: dict[str, tuple[Any, ...]] = {
    "stream": (1, "true", []),
    "stream_options": ("x", [], {"include_usage": 1}, {"include_usage": "yes"}),
    "stop": ([""], [1], {"a": 1}, ["x"] * 1000, [None], "\x00"),
    "stop_token_ids": ([True], ["5"], [-1], [2**70], [10**6]),
    "logit_bias": ({"x": 1}, {"-1": 1}, {"5": 1e308}, {"99999999": 1}, [1], {"5": True}),
    "previous_response_id": (["a"], {"a": 1}, 5, "gone", "\ud800"),
    "tools": ("x", [1], [{}], [{"type": "function"}], [{"type": "function", "function": {"name": 5}}]),
    "tool_choice": (5, "x", ["auto"], {"type": "function"}, {"type": "allowed_tools"}),
    "response_format": (
        "json",
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
        {"type": "json_schema", "json_schema": {"schema": {"pattern": "(" * 200, "type": "string"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    ),
    "structured_outputs": (
        *({"regex": each} for each in ("(", "(" * 5000, "a{1,1000}{1,1000}{1,1000}", "\ud800", "(?<=x)")),
        *({"grammar": each} for each in ("start: start", "x", "%json {", "(" * 5000)),
        *({"json": each} for each in ("{", "[" * FAR, 5, nest(DEEP))),
    ),
    "chat_template_kwargs": ({"messages": 1}, {"tools": 5}, {"a": nest(70)}, ["x"]),
    "metadata": (5, "x"),
    "reasoning": (5, {"effort": 5}, {"effort": "most"}),
    "thinking": (5, {"type": "x"}, {"type": "enabled", "budget_tokens": 1e308}),
    "text": (5, {"format": {"type": "json_schema", "schema": 5}}),
}


def _with_wrong_fields(path: str, good: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """One field after the other with values that it cannot have, or only just."""
    own = {*good} - {"model"}
    for name, value in itertools.chain(
        itertools.product(_FLOATS, (*NUMBERS, True, "5")),
        itertools.product(_COUNTS, (*WRONG, 1e308, 10**30)),
        ((name, value) for name, values in _OTHERS.items() for value in values),
        itertools.product(own, (*WRONG, None)),
    ):
        if path == "/messages/count_tokens" and name not in own:
            continue
        yield f"{name}={value!r:.40}", _json(good | {name: value})


_LISTED = {"id": ["c"], "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _conversations(asked: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Chats with messages and tools that no model can take."""

    def calling(arguments: Any) -> list[Any]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        return [*asked, turn, {"role": "tool", "tool_call_id": "c", "content": "1"}]

    yield "arguments without an end", {"messages": calling("[" * FAR)}
    yield "deep arguments", {"messages": calling("[" * FAR + "]" * FAR)}
    yield "arguments with half a character", {"messages": calling('{"a": "\\ud800"}')}
    yield "arguments that are no text", {"messages": calling({"a": nest(60)})}
    yield "arguments that are no number", {"messages": calling('{"a": NaN}')}
    tool = {"type": "function", "function": {"name": "f", "parameters": nest(DEEP)}}
    yield "a tool with a deep schema", {"tools": [tool]}
    tool = {"type": "function", "function": {"name": "f", "parameters": nest(55, {"type": "string"})}}
    yield "a tool with a schema of 55 levels", {"tools": [tool], "tool_choice": "required"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}}}
    yield "a tool whose schema leads nowhere", {"tools": [tool], "tool_choice": "required"}
    yield "an id that is a list", {"messages": [*asked, calling("{}")[-2] | {"tool_calls": [_LISTED]}]}
    yield (
        "an answer to a list",
        {"messages": [*calling("{}")[:-1], calling("{}")[-1] | {"tool_call_id": ["c"]}]},
    )
    yield "an image", {"messages": [{"role": "user", "content": [IMAGE]}]}
    yield "a part that is none", {"messages": [{"role": "user", "content": [5, {"type": "audio"}, None]}]}
    yield "a prompt that is too long", {"messages": [{"role": "user", "content": "yes or no? " * 20_000}]}
    yield "a huge prompt", {"messages": [{"role": "user", "content": "yes " * 100_000}]}
    yield "many messages", {"messages": asked * 20_000}
    yield "half a character", {"messages": [{"role": "user", "content": "\ud800"}]}
    yield "a name that is none", {"messages": [{"role": "user", "content": "x", "name": nest(40)}]}

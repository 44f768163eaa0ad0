"""Every field of the requests of OpenAI's and Anthropic's SDKs and of vLLM is honoured, or refused by name.

A field of an SDK that is not in these tables is to be refused.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import anthropic.types as claude
import anthropic.types.beta as claude_beta
import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import chat, completion_create_params, responses, shared_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from typing_extensions import get_type_hints, is_typeddict

from etude.core.call import Completion
from etude.core.errors import RequestError
from etude.wire.chat import ChatDialect, CompletionsDialect
from etude.wire.dialect import AnswerMemory, Dialect, RecordedCompletion
from etude.wire.messages import MessagesDialect
from etude.wire.responses import ResponsesDialect
from tests.wire.dialects import ASK

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": "{}"}}
PATHS: dict[str, tuple[type[Dialect], dict[str, Any]]] = {
    "/chat/completions": (ChatDialect, {"model": "m", "messages": ASK}),
    "/completions": (CompletionsDialect, {"model": "m", "prompt": "hi"}),
    "/responses": (ResponsesDialect, {"model": "m", "input": "hi"}),
    "/messages": (MessagesDialect, {"model": "m", "max_tokens": 9, "messages": ASK}),
}


@dataclass(frozen=True)
class Verdict:
    """A field with a value, those beside it, and the outcome."""

    word: str
    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)
    told: str = ""
    """Of a refusal, where it has another word than the field's name."""


def honoured(value: Any, **beside: Any) -> Verdict:
    """The answer that is asked for, or the reply, is another one."""
    return Verdict("honoured", value, beside)


def free(value: Any) -> Verdict:
    """Accepted: by its nature it changes nothing about the answer."""
    return Verdict("free", value)


def refused(value: Any, told: str = "") -> Verdict:
    """Refused, with the field's name."""
    return Verdict("refused", value, told=told)


def put(body: dict[str, Any]) -> dict[str, Any]:
    """An object that is the body itself."""
    return body


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "add", **fields}}]}


@dataclass(frozen=True)
class Part:
    """An object in a request, as an SDK declares it."""

    path: str
    kinds: tuple[Any, ...]
    fields: Mapping[str, Verdict | tuple[Verdict, ...]]
    within: Callable[[dict[str, Any]], dict[str, Any]] = put
    """A body, but for what all have, with the object."""
    more: frozenset[str] = frozenset()
    """Fields that no SDK has: vLLM's."""


COMMON = {
    "model": honoured("other"),
    "frequency_penalty": honoured(0.5),
    "logit_bias": honoured({"5": 1}),
    "max_tokens": honoured(7),
    "n": honoured(2),
    "presence_penalty": honoured(0.5),
    "seed": honoured(3),
    "stop": honoured(["x"]),
    "stream_options": honoured({"include_usage": True}, stream=True),
    "temperature": honoured(0.5),
    "top_p": honoured(0.5),
    "user": free("someone"),
}
REFUSED = (
    "add_special_tokens allowed_token_ids bad_words ec_transfer_params ignore_eos include_stop_str_in_output "
    "kv_transfer_params length_penalty logprob_token_ids repetition_detection return_token_offsets "
    "routed_experts_prompt_start session_id stream_interval thinking_token_budget truncate_prompt_tokens "
    "truncation_side use_beam_search vllm_xargs watermarking"
)
VLLM: dict[str, Verdict | tuple[Verdict, ...]] = {
    **dict.fromkeys(REFUSED.split(), refused({"a": 1})),
    "cache_salt": free("x"),
    "min_p": honoured(0.1),
    "min_tokens": honoured(2),
    "priority": (free(0), refused(1)),
    "prompt_logprobs": refused(1),
    "repetition_penalty": honoured(1.2),
    "request_id": free("x"),
    "return_token_ids": honoured(True),
    "return_tokens_as_token_ids": honoured(True),
    "skip_special_tokens": (free(False), refused(True)),
    "spaces_between_special_tokens": (free(True), free(False)),
    "stop_token_ids": honoured([5]),
    "structured_outputs": honoured({"regex": "a+"}),
    "top_k": honoured(5),
}
"""Of 0.32 and a few later ones."""
VLLM_CHAT = VLLM | {
    "add_generation_prompt": refused(True),
    "chat_template_kwargs": honoured({"a": 1}),
    "continue_final_message": refused(False),
    "echo": refused(True),
    "include_reasoning": refused(True),
    "return_prompt_text": refused(True),
}
VLLM_TEXT = VLLM | {"add_special_tokens": refused(False), "response_format": honoured(JSON_SCHEMA)}
CHAT = COMMON | {
    "logprobs": honoured(True),
    "max_completion_tokens": honoured(7),
    "messages": honoured([*ASK, *ASK]),
    "metadata": free({"a": "b"}),
    "modalities": (free(["text"]), refused(["text", "audio"])),
    "parallel_tool_calls": honoured(False),
    "prediction": free({"type": "content", "content": "x"}),
    "prompt_cache_key": free("x"),
    "prompt_cache_options": free({"ttl": "30m"}),
    "prompt_cache_retention": free("24h"),
    "reasoning_effort": honoured("low"),
    "response_format": (
        honoured(JSON_SCHEMA),
        honoured({"type": "json_object"}),
        refused({"type": "json_object", "schema": SCHEMA}),
        refused({"type": "structural_tag"}),
    ),
    "safety_identifier": free("x"),
    "service_tier": (free("auto"), free("default"), free("flex"), refused("priority"), refused("fast")),
    "store": free(False),
    "tool_choice": (honoured("required", tools=[ADD]), refused({"type": "custom", "custom": {"name": "x"}})),
    "tools": honoured([ADD]),
    "top_logprobs": (honoured(2, logprobs=True), refused(2)),
    "verbosity": free("low"),
}
TEXT = COMMON | {
    "stream_options": refused({"include_usage": True}),
    "logprobs": honoured(2),
    "prompt": honoured([[5]]),
}
RESPONSES = {
    "background": (free(False), refused(True)),
    "include": (free(["reasoning.encrypted_content"]), refused(["message.output_text.logprobs"])),
    "input": honoured("what?"),
    "instructions": honoured("Be brief."),
    "max_output_tokens": honoured(7),
    "metadata": free({"a": "b"}),
    "model": honoured("other"),
    "parallel_tool_calls": honoured(False),
    "previous_response_id": refused("resp_of_another"),
    "prompt_cache_key": free("x"),
    "prompt_cache_options": free({"ttl": "30m"}),
    "prompt_cache_retention": free("24h"),
    "reasoning": honoured({"effort": "low"}),
    "safety_identifier": free("x"),
    "service_tier": (free("auto"), refused("priority")),
    "store": honoured(False),
    "stream_options": free({"include_obfuscation": False}),
    "temperature": honoured(0.5),
    "text": honoured({"format": {"type": "json_object"}}),
    "tool_choice": honoured("required", tools=[{"type": "function", "name": "add"}]),
    "tools": honoured([{"type": "function", "name": "add"}]),
    "top_logprobs": refused(2),
    "top_p": honoured(0.5),
    "truncation": (free("disabled"), refused("auto")),
    "user": free("someone"),
}
MESSAGES = {
    "cache_control": free({"type": "ephemeral"}),
    "diagnostics": free({"previous_message_id": "x"}),
    "inference_geo": (free("global"), refused("us")),
    "max_tokens": honoured(7),
    "messages": honoured([*ASK, *ASK]),
    "metadata": free({"user_id": "x"}),
    "model": honoured("other"),
    "output_config": honoured({"effort": "low"}),
    "service_tier": (free("auto"), free("standard_only"), refused("priority")),
    "speed": (free("standard"), refused("fast")),
    "stop_sequences": honoured(["x"]),
    "system": honoured("Be brief."),
    "thinking": honoured({"type": "enabled", "budget_tokens": 1024}),
    "tool_choice": honoured({"type": "any"}, tools=[{"name": "add"}]),
    "tools": honoured([{"name": "add"}]),
    "user_profile_id": free("x"),
    "workspace_id": free("x"),
}
BETA = MESSAGES | {
    "context_management": (free({"edits": []}), refused({"edits": [{"type": "clear_tool_uses_20250919"}]})),
    "mcp_servers": (free([]), refused([{"type": "url", "url": "x", "name": "x"}])),
    "thread": refused({"type": "create"}),
}


def said(**fields: Any) -> dict[str, Any]:
    return {"messages": [*ASK, {"role": "assistant", "content": "x", **fields}, *ASK]}


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


def used(result: Mapping[str, Any], use: Mapping[str, Any]) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "t1", "name": "add", "input": {}, **use}
    answer = {"type": "tool_result", "tool_use_id": "t1", **result}
    talk = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [answer]}]
    return {"messages": [*ASK, *talk]}


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "add", **fields}]}


PARTS = [
    Part(
        "/chat/completions",
        (chat_create_params.CompletionCreateParamsBase,),
        VLLM_CHAT | CHAT,
        more=frozenset(VLLM_CHAT),
    ),
    Part(
        "/completions",
        (completion_create_params.CompletionCreateParamsBase,),
        VLLM_TEXT | TEXT,
        more=frozenset(VLLM_TEXT),
    ),
    Part("/responses", (response_create_params.ResponseCreateParamsBase,), RESPONSES),
    Part("/messages", (message_create_params.MessageCreateParamsBase,), MESSAGES),
    Part("/messages", (beta_message_create_params.MessageCreateParamsBase,), BETA),
    Part(
        "/chat/completions",
        (chat.ChatCompletionStreamOptionsParam,),
        {
            "include_usage": honoured(True),
            "include_obfuscation": (free(False), refused(True)),
            "continuous_usage_stats": refused(True),
        },
        lambda found: {"stream": True, "stream_options": found},
        frozenset({"continuous_usage_stats"}),
    ),
    Part(
        "/chat/completions",
        (shared_params.FunctionDefinition,),
        {
            "name": honoured("sub"),
            "description": honoured("Adds."),
            "parameters": (honoured(SCHEMA), refused("{}"), refused([])),
            "strict": (honoured(True), refused("yes")),
        },
        lambda found: tool(**found),
    ),
    Part(
        "/chat/completions",
        (chat.ChatCompletionAssistantMessageParam,),
        {
            "role": honoured("user"),
            "content": honoured("y"),
            "name": honoured("x"),
            "tool_calls": honoured([CALL]),
            "refusal": refused("No."),
            "reasoning": (honoured("1 + 2"), refused({"text": "1 + 2"})),
        },
        lambda found: said(**found),
        frozenset({"reasoning"}),
    ),
    Part(
        "/responses",
        (responses.FunctionToolParam,),
        {
            "type": refused("custom"),
            "name": honoured("sub"),
            "parameters": honoured(SCHEMA),
            "strict": honoured(True),
            "description": honoured("Adds."),
            "allowed_callers": (free(["direct"]), refused(["programmatic"])),
            "defer_loading": (free(False), refused(True)),
        },
        lambda found: function(**found),
    ),
    Part(
        "/responses",
        (shared_params.Reasoning,),
        {
            "context": (free("auto"), refused("all_turns")),
            "effort": honoured("low"),
            "generate_summary": free("auto"),
            "summary": free("auto"),
            "mode": refused("pro"),
        },
        lambda found: {"reasoning": found},
    ),
    Part(
        "/messages",
        (claude.ToolParam, claude_beta.BetaToolParam),
        {
            "allowed_callers": (free(["direct"]), refused(["code_execution_20260120"])),
            "cache_control": free({"type": "ephemeral"}),
            "defer_loading": (free(False), refused(True)),
            "description": honoured("Adds."),
            "eager_input_streaming": free(True),
            "input_examples": refused([{}]),
            "input_schema": honoured(SCHEMA),
            "name": honoured("sub"),
            "strict": honoured(True),
            "type": (free("custom"), refused("bash_20250124")),
        },
        lambda found: {"tools": [{"name": "add", **found}]},
    ),
    Part(
        "/messages",
        (claude.OutputConfigParam,),
        {
            "effort": honoured("low"),
            "format": honoured({"type": "json_schema", "schema": SCHEMA}),
            "task_budget": refused({"type": "tokens", "total": 5}),
        },
        lambda found: {"output_config": found},
        frozenset({"task_budget"}),
    ),
    Part(
        "/messages",
        (claude.ThinkingConfigEnabledParam, claude.ThinkingConfigAdaptiveParam),
        {
            "type": (honoured("disabled"), refused("between_tools")),
            "budget_tokens": free(2048),
            "display": (free("summarized"), free("omitted")),
            "keep": refused("all"),
        },
        lambda found: {"thinking": {"type": "enabled", **found}},
        frozenset({"keep"}),
    ),
    Part(
        "/messages",
        (claude.ToolChoiceToolParam, claude.ToolChoiceAnyParam),
        {
            "type": (honoured("any"), refused("some")),
            "name": refused("sub", "no tool 'sub'"),
            "disable_parallel_tool_use": honoured(True),
        },
        lambda found: {"tools": [{"name": "add"}], "tool_choice": {"type": "tool", "name": "add", **found}},
    ),
    Part(
        "/messages",
        (claude.ToolUseBlockParam,),
        {
            "type": refused("server_tool_use"),
            "id": refused("t2"),
            "input": honoured({"a": 1}),
            "name": honoured("sub"),
            "cache_control": free({"type": "ephemeral"}),
            "caller": free({"type": "direct"}),
            "toolset_name": free("x"),
        },
        lambda found: used({}, found),
    ),
    Part(
        "/messages",
        (claude.ToolResultBlockParam,),
        {
            "type": refused("web_search_tool_result"),
            "tool_use_id": refused("t2", "tool_call_id"),
            "content": honoured("3"),
            # The text says what went wrong; chat templates have no place for more.
            "is_error": free(True),
            "cache_control": free({"type": "ephemeral"}),
            "toolset_name": free("x"),
        },
        lambda found: used(found, {}),
    ),
]


def verdicts(part: Part) -> Iterator[tuple[str, Verdict]]:
    """Of each field that the tables or an SDK have; an SDK's alone are to be refused."""
    named = {name: refused({"a": 1}) for kind in part.kinds for name in get_type_hints(kind)}
    assert set(part.fields) <= named.keys() | part.more
    for name, found in (named | part.fields).items():
        yield from ((name, each) for each in (found if isinstance(found, tuple) else (found,)))


def seen(path: str, more: Mapping[str, Any]) -> tuple[Any, Any]:
    """The request that a body is, and the reply to it."""
    kind, common = PATHS[path]
    dialect, body = kind(AnswerMemory()), {**common, **more}
    asked = dialect.parse(body)
    message = {"role": "assistant", "content": "3", "reasoning_content": "1 + 2"}
    said = Completion(message, prompt_ids=(1, 2), completion_ids=(5,), logprobs=(-0.5,))
    answer = RecordedCompletion("id", "m", completion=said)
    return asked, dialect.reply([answer], replace(asked, body=body))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.path[1:]} {part.kinds[0].__name__}")
def test_a_field_is_honoured_or_refused_by_name(part: Part) -> None:
    for name, verdict in verdicts(part):
        without, with_it = ({**verdict.beside} | own for own in ({}, {name: verdict.value}))
        if verdict.word == "refused":
            try:
                seen(part.path, part.within(with_it))
            except RequestError as error:
                assert (verdict.told or name) in f"{error.param} {error}"
            else:
                pytest.fail(f"{name} is not refused")
            continue
        before, after = (seen(part.path, part.within(body)) for body in (without, with_it))
        assert (before != after) if verdict.word == "honoured" else (before[0] == after[0]), (name, verdict)


@pytest.mark.parametrize("part", [{}, {"text": None}, {"text": 5}])
def test_a_part_of_text_has_a_text(part: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.content.* text .* string"):
        seen("/chat/completions", block(type="text", **part))


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/messages", {"messages": [*ASK, {"role": "assistant", "content": "So"}]}, "a partial answer"),
        ("/responses", {"input": []}, "input .* found none"),
        ("/responses", {"tool_choice": "required"}, "tool_choice: .* no tools"),
        (
            "/responses",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "3"}]},
            "found 'c'",
        ),
    ],
)
def test_what_no_model_can_answer_is_refused(path: str, body: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        seen(path, body)


def test_thoughts_are_sent_back_by_either_name() -> None:
    named = [
        seen("/chat/completions", said(**{name: "1 + 2"})) for name in ("reasoning", "reasoning_content")
    ]
    assert named[0] == named[1]


def kinds_in(hint: Any) -> Iterator[Any]:
    """The objects that a field may hold."""
    if is_typeddict(hint):
        yield hint
    for each in typing.get_args(hint) if not isinstance(hint, types.GenericAlias) else hint.__args__:
        yield from kinds_in(each)


OBJECTS = [
    ("/chat/completions", chat_create_params.CompletionCreateParamsBase, "tools", {"function"}),
    ("/responses", response_create_params.ResponseCreateParamsBase, "tools", {"function", "namespace"}),
    ("/messages", message_create_params.MessageCreateParamsBase, "tools", {"custom"}),
    ("/messages", beta_message_create_params.MessageCreateParamsBase, "tools", {"custom"}),
    (
        "/responses",
        response_create_params.ResponseCreateParamsBase,
        "input",
        {"message", "function_call", "function_call_output", "reasoning"},
    ),
    (
        "/chat/completions",
        chat_create_params.CompletionCreateParamsBase,
        "response_format",
        {"text", "json_object", "json_schema"},
    ),
]


@pytest.mark.parametrize(("path", "kind", "name", "known"), OBJECTS)
def test_objects_of_other_types_are_refused(path: str, kind: Any, name: str, known: set[str]) -> None:
    hint = get_type_hints(kind)[name]
    named = {
        type
        for each in kinds_in(hint)
        for type in typing.get_args(get_type_hints(each).get("type"))
        if isinstance(type, str)
    }
    assert known <= named | {"custom"} and len(named) > 1
    for type in named - known:
        found: Any = {"type": type, "name": "x"}
        with pytest.raises(RequestError) as raised:
            seen(path, {name: found if name == "response_format" else [found]})
        assert name in f"{raised.value.param} {raised.value}"

"""Every field of requests of OpenAI's and Anthropic's SDKs and of vLLM is honoured, or refused by name."""

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


def honour(value: Any, **beside: Any) -> Verdict:
    """The answer that is asked for, or the reply, is another one."""
    return Verdict("honoured", value, beside)


def free(value: Any) -> Verdict:
    """Accepted: by its nature it changes nothing about the answer."""
    return Verdict("free", value)


def refuse(value: Any, told: str = "") -> Verdict:
    """Refused, with the field's name."""
    return Verdict("refused", value, told=told)


def put(body: dict[str, Any]) -> dict[str, Any]:
    """An object that is the body itself."""
    return body


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


ALWAYS = {"model": honour("other"), "temperature": honour(0.5), "top_p": honour(0.5), "user": free("someone")}
OF_OPENAI = ALWAYS | {
    "metadata": free({"a": "b"}),
    "parallel_tool_calls": honour(False),
    "prompt_cache_key": free("x"),
    "prompt_cache_options": free({"ttl": "30m"}),
    "prompt_cache_retention": free("24h"),
    "safety_identifier": free("x"),
}
COMMON = ALWAYS | {
    "frequency_penalty": honour(0.5),
    "logit_bias": honour({"5": 1}),
    "max_tokens": honour(7),
    "n": honour(2),
    "presence_penalty": honour(0.5),
    "seed": honour(3),
    "stop": honour(["x"]),
    "stream_options": honour({"include_usage": True}, stream=True),
}
REFUSED = (
    "add_special_tokens allowed_token_ids bad_words ec_transfer_params ignore_eos include_stop_str_in_output "
    "kv_transfer_params length_penalty logprob_token_ids repetition_detection return_token_offsets "
    "routed_experts_prompt_start session_id stream_interval thinking_token_budget truncate_prompt_tokens "
    "truncation_side use_beam_search vllm_xargs watermarking"
)
VLLM: dict[str, Verdict | tuple[Verdict, ...]] = {
    **dict.fromkeys(REFUSED.split(), refuse({"a": 1})),
    "cache_salt": free("x"),
    "min_p": honour(0.1),
    "min_tokens": honour(2),
    "priority": (free(0), refuse(1)),
    "prompt_logprobs": refuse(1),
    "repetition_penalty": honour(1.2),
    "request_id": free("x"),
    "return_token_ids": honour(True),
    "return_tokens_as_token_ids": honour(True),
    "skip_special_tokens": (free(False), refuse(True)),
    "spaces_between_special_tokens": (free(True), free(False)),
    "stop_token_ids": honour([5]),
    "structured_outputs": honour({"regex": "a+"}),
    "top_k": honour(5),
}
"""Of 0.32 and a few later ones."""
VLLM_CHAT = VLLM | {
    "add_generation_prompt": refuse(True),
    "chat_template_kwargs": honour({"a": 1}),
    "continue_final_message": refuse(False),
    "echo": refuse(True),
    "include_reasoning": refuse(True),
    "return_prompt_text": refuse(True),
}
VLLM_TEXT = VLLM | {"add_special_tokens": refuse(False), "response_format": honour(JSON_SCHEMA)}
CHAT = (
    COMMON
    | OF_OPENAI
    | {
        "logprobs": honour(True),
        "max_completion_tokens": honour(7),
        "messages": honour([*ASK, *ASK]),
        "modalities": (free(["text"]), refuse(["text", "audio"])),
        "prediction": free({"type": "content", "content": "x"}),
        "reasoning_effort": honour("low"),
        "response_format": (
            honour(JSON_SCHEMA),
            honour({"type": "json_object"}),
            refuse({"type": "json_object", "schema": SCHEMA}),
            refuse({"type": "structural_tag"}),
        ),
        "service_tier": (free("auto"), free("default"), free("flex"), refuse("priority"), refuse("fast")),
        "store": free(False),
        "tool_choice": (honour("required", tools=[ADD]), refuse({"type": "custom", "custom": {"name": "x"}})),
        "tools": honour([ADD]),
        "top_logprobs": (honour(2, logprobs=True), refuse(2)),
        "verbosity": free("low"),
    }
)
TEXT = COMMON | {
    "stream_options": refuse({"include_usage": True}),
    "logprobs": honour(2),
    "prompt": honour([[5]]),
}
RESPONSES = OF_OPENAI | {
    "background": (free(False), refuse(True)),
    "include": (free(["reasoning.encrypted_content"]), refuse(["message.output_text.logprobs"])),
    "input": honour("what?"),
    "instructions": honour("Be brief."),
    "max_output_tokens": honour(7),
    "previous_response_id": refuse("resp_of_another"),
    "reasoning": honour({"effort": "low"}),
    "service_tier": (free("auto"), refuse("priority")),
    "store": honour(False),
    "stream_options": free({"include_obfuscation": False}),
    "text": honour({"format": {"type": "json_object"}}),
    "tool_choice": honour("required", tools=[{"type": "function", "name": "add"}]),
    "tools": honour([{"type": "function", "name": "add"}]),
    "top_logprobs": refuse(2),
    "truncation": (free("disabled"), refuse("auto")),
}
MESSAGES = {
    "cache_control": free({"type": "ephemeral"}),
    "diagnostics": free({"previous_message_id": "x"}),
    "inference_geo": (free("global"), refuse("us")),
    "max_tokens": honour(7),
    "messages": honour([*ASK, *ASK]),
    "metadata": free({"user_id": "x"}),
    "model": honour("other"),
    "output_config": honour({"effort": "low"}),
    "service_tier": (free("auto"), free("standard_only"), refuse("priority")),
    "speed": (free("standard"), refuse("fast")),
    "stop_sequences": honour(["x"]),
    "system": honour("Be brief."),
    "thinking": honour({"type": "enabled", "budget_tokens": 1024}),
    "tool_choice": honour({"type": "any"}, tools=[{"name": "add"}]),
    "tools": honour([{"name": "add"}]),
    "user_profile_id": free("x"),
    "workspace_id": free("x"),
}
BETA = MESSAGES | {
    "context_management": (free({"edits": []}), refuse({"edits": [{"type": "clear_tool_uses_20250919"}]})),
    "mcp_servers": (free([]), refuse([{"type": "url", "url": "x", "name": "x"}])),
    "thread": refuse({"type": "create"}),
}


def reply(**fields: Any) -> dict[str, Any]:
    return {"messages": [*ASK, {"role": "assistant", "content": "x", **fields}, *ASK]}


def tool_round(result: Mapping[str, Any], use: Mapping[str, Any]) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "t1", "name": "add", "input": {}, **use}
    answer = {"type": "tool_result", "tool_use_id": "t1", **result}
    talk = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [answer]}]
    return {"messages": [*ASK, *talk]}


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
            "include_usage": honour(True),
            "include_obfuscation": (free(False), refuse(True)),
            "continuous_usage_stats": refuse(True),
        },
        lambda found: {"stream": True, "stream_options": found},
        frozenset({"continuous_usage_stats"}),
    ),
    Part(
        "/chat/completions",
        (shared_params.FunctionDefinition,),
        {
            "name": honour("sub"),
            "description": honour("Adds."),
            "parameters": (honour(SCHEMA), refuse("{}"), refuse([])),
            "strict": (honour(True), refuse("yes")),
        },
        lambda found: {"tools": [{"type": "function", "function": {"name": "add", **found}}]},
    ),
    Part(
        "/chat/completions",
        (chat.ChatCompletionAssistantMessageParam,),
        {
            "role": honour("user"),
            "content": honour("y"),
            "name": honour("x"),
            "tool_calls": honour([CALL]),
            "refusal": refuse("No."),
            "reasoning": (honour("1 + 2"), refuse({"text": "1 + 2"})),
        },
        lambda found: reply(**found),
        frozenset({"reasoning"}),
    ),
    Part(
        "/responses",
        (responses.FunctionToolParam,),
        {
            "type": refuse("custom"),
            "name": honour("sub"),
            "parameters": honour(SCHEMA),
            "strict": honour(True),
            "description": honour("Adds."),
            "allowed_callers": (free(["direct"]), refuse(["programmatic"])),
            "defer_loading": (free(False), refuse(True)),
        },
        lambda found: {"tools": [{"type": "function", "name": "add", **found}]},
    ),
    Part(
        "/responses",
        (shared_params.Reasoning,),
        {
            "context": (free("auto"), refuse("all_turns")),
            "effort": honour("low"),
            "generate_summary": free("auto"),
            "summary": free("auto"),
            "mode": refuse("pro"),
        },
        lambda found: {"reasoning": found},
    ),
    Part(
        "/messages",
        (claude.ToolParam, claude_beta.BetaToolParam),
        {
            "allowed_callers": (free(["direct"]), refuse(["code_execution_20260120"])),
            "cache_control": free({"type": "ephemeral"}),
            "defer_loading": (free(False), refuse(True)),
            "description": honour("Adds."),
            "eager_input_streaming": free(True),
            "input_examples": refuse([{}]),
            "input_schema": honour(SCHEMA),
            "name": honour("sub"),
            "strict": honour(True),
            "type": (free("custom"), refuse("bash_20250124")),
        },
        lambda found: {"tools": [{"name": "add", **found}]},
    ),
    Part(
        "/messages",
        (claude.OutputConfigParam,),
        {
            "effort": honour("low"),
            "format": honour({"type": "json_schema", "schema": SCHEMA}),
            "task_budget": refuse({"type": "tokens", "total": 5}),
        },
        lambda found: {"output_config": found},
        frozenset({"task_budget"}),
    ),
    Part(
        "/messages",
        (claude.ThinkingConfigEnabledParam, claude.ThinkingConfigAdaptiveParam),
        {
            "type": (honour("disabled"), refuse("between_tools")),
            "budget_tokens": free(2048),
            "display": (free("summarized"), free("omitted")),
            "keep": refuse("all"),
        },
        lambda found: {"thinking": {"type": "enabled", **found}},
        frozenset({"keep"}),
    ),
    Part(
        "/messages",
        (claude.ToolChoiceToolParam, claude.ToolChoiceAnyParam),
        {
            "type": (honour("any"), refuse("some")),
            "name": refuse("sub", "no tool 'sub'"),
            "disable_parallel_tool_use": honour(True),
        },
        lambda found: {"tools": [{"name": "add"}], "tool_choice": {"type": "tool", "name": "add", **found}},
    ),
    Part(
        "/messages",
        (claude.ToolUseBlockParam,),
        {
            "type": refuse("server_tool_use"),
            "id": refuse("t2"),
            "input": honour({"a": 1}),
            "name": honour("sub"),
            "cache_control": free({"type": "ephemeral"}),
            "caller": free({"type": "direct"}),
            "toolset_name": free("x"),
        },
        lambda found: tool_round({}, found),
    ),
    Part(
        "/messages",
        (claude.ToolResultBlockParam,),
        {
            "type": refuse("web_search_tool_result"),
            "tool_use_id": refuse("t2", "tool_call_id"),
            "content": honour("3"),
            # The text says what went wrong; chat templates have no place for more.
            "is_error": free(True),
            "cache_control": free({"type": "ephemeral"}),
            "toolset_name": free("x"),
        },
        lambda found: tool_round(found, {}),
    ),
]


def verdicts(part: Part) -> Iterator[tuple[str, Verdict]]:
    """Of each field that the tables or an SDK have; an SDK's alone are to be refused."""
    named = {name: refuse({"a": 1}) for kind in part.kinds for name in get_type_hints(kind)}
    assert set(part.fields) <= named.keys() | part.more
    for name, found in (named | part.fields).items():
        yield from ((name, each) for each in (found if isinstance(found, tuple) else (found,)))


def read(path: str, more: Mapping[str, Any]) -> tuple[Any, Any]:
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
                read(part.path, part.within(with_it))
            except RequestError as error:
                assert (verdict.told or name) in f"{error.param} {error}"
            else:
                pytest.fail(f"{name} is not refused")
            continue
        before, after = (read(part.path, part.within(body)) for body in (without, with_it))
        assert (before != after) if verdict.word == "honoured" else (before[0] == after[0]), (name, verdict)


@pytest.mark.parametrize("part", [{}, {"text": None}, {"text": 5}])
def test_a_part_of_text_has_a_text(part: dict[str, Any]) -> None:
    asked = {"role": "user", "content": [{"type": "text", **part}]}
    with pytest.raises(RequestError, match=r"messages\[0\]\.content.* text .* string"):
        read("/chat/completions", {"messages": [asked]})


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
        read(path, body)


def test_thoughts_are_sent_back_by_either_name() -> None:
    named = [
        read("/chat/completions", reply(**{name: "1 + 2"})) for name in ("reasoning", "reasoning_content")
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
            read(path, {name: found if name == "response_format" else [found]})
        assert name in f"{raised.value.param} {raised.value}"

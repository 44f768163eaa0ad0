"""Answers sampled in a form have that form, whatever else is in the batch; impossible forms are refused."""

import asyncio
import copy
import json
import re

import jsonschema
import pytest

from etude.core.call import ChatRequest, Constraint, Sampling
from etude.core.errors import ImpossibleCall
from etude.engines.embedded import EmbeddedEngine
from tests.models.tiny_models import CALCULATOR, chatml_policy, continuing, fresh_policy, policy, user
from tests.support import one_quick

PROMPT = (8, 9, 10, 11)
STRICT = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
PLAIN = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"key": {"enum": ["x", "y"]}},
            "required": ["key"],
            "additionalProperties": False,
        },
    },
}


async def _answers(of, requests):
    engine = EmbeddedEngine(of)
    try:
        ask = [(engine.complete if one.prompt is None else engine.sample)(one) for one in requests]
        return await asyncio.gather(*ask, return_exceptions=True)
    finally:
        await engine.close()


def answers(of, *requests):
    return asyncio.run(_answers(of, requests))


def request(kind, text="", *, key=0, **sampling):
    constraint = Constraint(kind, text)
    return continuing(PROMPT, Sampling(**{"max_tokens": 200} | sampling, constraint=constraint), key)


SCHEMA = {
    "type": "object",
    "properties": {
        "what is": {"type": "integer", "minimum": -20, "maximum": 30},
        "é": {"type": "array", "items": {"enum": ["a", 'q"', 3, None]}, "minItems": 1, "maxItems": 3},
        "z9": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["what is", "é", "z9"],
    "additionalProperties": False,
}
FORMS = {
    ("regex", "([ab]what|[^a-z ]{1,2}(x|yes|é)){2,4}"): r"([ab]what|[^a-z ]{1,2}(x|yes|é)){2,4}",
    ("choice", '["yes", "no", "a/\\"b\\""]'): r'yes|no|a/"b"',
    ("grammar", 'start: "x" DIGITS\nDIGITS: /[0-9]{3}/'): "x[0-9]{3}",
    # Names of special tokens, as text.
    ("choice", '["a<|user|>b", "<|end|>"]'): r"a<\|user\|>b|<\|end\|>",
    ("choice", '["<|end|>"]'): r"<\|end\|>",
    ("regex", r"x<\|end\|>"): r"x<\|end\|>",
    ("json_schema", '{"enum": ["<|\\u0065nd|>"]}'): r'"<\|end\|>"',
}


def test_every_answer_has_its_form():
    keys = range(5)
    asked = [request(*form, key=key) for form in FORMS for key in keys]
    asked += [request("json_schema", json.dumps(SCHEMA), key=key) for key in keys]
    asked += [request("json_object", key=key) for key in keys]
    given = iter(answers(policy(), *asked))
    for pattern in FORMS.values():
        assert all(re.fullmatch(pattern, next(given).message["content"]) for _ in keys)
    for _ in keys:
        jsonschema.validate(json.loads(next(given).message["content"]), SCHEMA)
    complete = [answer for answer in given if answer.finish_reason == "stop"]
    assert complete
    assert all(isinstance(json.loads(answer.message["content"]), dict) for answer in complete)


MIXED = [
    Sampling(max_tokens=12),
    Sampling(max_tokens=12, constraint=Constraint("regex", "(what|[a-c]){3,9}")),
    Sampling(max_tokens=12, temperature=0.0, constraint=Constraint("regex", "(what|[a-c]){3,9}")),
    Sampling(max_tokens=12, top_k=5, frequency_penalty=1.0),
    Sampling(max_tokens=12, repetition_penalty=1.5, min_p=0.02, min_tokens=12),
]


def test_an_answer_does_not_depend_on_its_company():
    of = policy()
    asked = [continuing(PROMPT, sampling, key) for key, sampling in enumerate(MIXED)]
    alone = [answers(of, one)[0] for one in asked]
    together = answers(of, *asked, *(continuing((9, 8), Sampling(max_tokens=7), key) for key in range(9)))
    for one, other in zip(alone, together, strict=False):
        assert one.completion_ids == other.completion_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"type": "foo"}', "held to its json_schema: Invalid type: foo"),
        ("json_schema", '{"type": "string", "not": {"const": "a"}}', r"Unimplemented keys: \[\"not\"\]"),
        ("json_schema", '{"$ref": "#"}', "no answer"),
        ("json_schema", "[1]", r"JSON schema .* object, found \[1\]"),
        ("regex", "[a", "unclosed character class"),
        ("regex", r"[^\s\S]", "its regex: "),
        ("choice", "[]", r"JSON list .*, found \[\]"),
        ("grammar", "start: other", "unknown name"),
    ],
)
def test_a_form_that_no_answer_can_have_is_refused(kind, text, reason):
    (error,) = answers(policy(), request(kind, text))
    assert isinstance(error, ImpossibleCall)
    assert re.search(reason, str(error)), error


def calling(choice="auto", *, tools=(STRICT, PLAIN), parallel=True, key=0, **sampling):
    return ChatRequest(
        (user("what?"),),
        tuple(tools),
        Sampling(**{"max_tokens": 300} | sampling),
        key,
        tool_choice=choice,
        parallel_tool_calls=parallel,
    )


CHECK = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (STRICT, PLAIN)}


def called_tools(answer):
    """The names of the called tools; their arguments fit their schemas."""
    calls = [call["function"] for call in answer.message.get("tool_calls") or ()]
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), CHECK[call["name"]])
    return [call["name"] for call in calls]


@pytest.mark.parametrize("of", one_quick(chatml_policy, fresh_policy))
def test_tools_are_called_as_the_choice_says(of):
    model, keys = of(), range(4)
    model.max_context = 1024
    # A random model is fond of blanks.
    short = {"logit_bias": tuple((model.tokenizer.convert_tokens_to_ids(sign), -100.0) for sign in "ĊĉĠ")}
    given = iter(
        answers(
            model,
            *(calling("required", parallel=False, key=key, **short) for key in keys),
            *(calling("function:look_up", key=key, **short) for key in keys),
            *(calling("none", key=key, max_tokens=30) for key in keys),
            *(calling(key=key, constraint=Constraint("choice", '["no"]'), **short) for key in keys),
        )
    )
    assert {tuple(called_tools(next(given))) for _ in keys} <= {("add",), ("look_up",)}
    assert [called_tools(next(given)) for _ in keys] == [["look_up"]] * 4
    assert all("<tool_call>" not in next(given).message["content"] for _ in keys)
    assert all(next(given).message.get("content") in (None, "no") for _ in keys)


def test_several_calls_are_one_answer_where_they_may_be():
    model = policy()
    more = model.tokenizer("</tool_call><tool_call>", add_special_tokens=False)["input_ids"]
    bias = tuple((token, 20.0) for token in {*more, *model.tokenizer("}")["input_ids"]})
    (answer,) = answers(model, calling("required", logit_bias=bias, max_tokens=150))
    # It is cut off in the middle of a call, and so stays text.
    assert answer.finish_reason == "length"
    assert answer.message["content"].count("</tool_call><tool_call>") > 1
    (answer,) = answers(model, calling("required", logit_bias=bias, max_tokens=150, parallel=False))
    assert len(called_tools(answer)) == 1


def test_calls_whose_arguments_are_not_json_are_refused_by_name():
    template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
        "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}"
        "{% for name, value in call.function.arguments.items() %}<{{ name }}>{{ value }}{% endfor %}</call>"
        "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (error, fine) = answers(
        chatml_policy(template), calling("required"), calling(tools=[CALCULATOR], max_tokens=2)
    )
    assert "tool_choice required" in str(error)
    assert "arguments are JSON" in str(error)
    assert fine.usage.completion_tokens <= 2
    (error,) = answers(policy(), calling("function:nothing"))
    assert re.search("'nothing', .* add, look_up", str(error))


def thinking_policy():
    model = chatml_policy()
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.add_tokens(["<think>", "</think>"])
    model.model.resize_token_embeddings(len(tokenizer))
    return type(model)(model.model, tokenizer, "thinking", model.device)


def test_thoughts_come_before_the_form():
    model = thinking_policy()
    begin, end = model.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    form = Sampling(max_tokens=40, constraint=Constraint("regex", "[ab]{3}"))
    opened = Sampling(max_tokens=40, constraint=form.constraint, logit_bias=((begin, 50.0), (end, 5.0)))
    asked = [continuing((*PROMPT, begin), opened, key) for key in range(4)]
    asked += [continuing(PROMPT, opened, key) for key in range(4)]
    asked += [continuing((*PROMPT, begin, 9, end), form, key) for key in range(4)]
    given = [answer for answer in answers(model, *asked) if answer.finish_reason == "stop"]
    assert given
    for answer in given:
        assert re.fullmatch(r"(?s)((<think>)?.*</think>\s*)?[ab]{3}", answer.message["content"])
    assert any("</think>" in answer.message["content"] for answer in given)


def test_an_answer_is_as_long_as_it_must_be_and_ends_where_it_may():
    model = policy()
    (stop,) = model.stop_ids
    likely = ((stop, 100.0),)
    short, long, cut = answers(
        model,
        continuing(PROMPT, Sampling(max_tokens=20, logit_bias=likely)),
        continuing(PROMPT, Sampling(max_tokens=20, logit_bias=likely, min_tokens=7)),
        continuing(PROMPT, Sampling(max_tokens=20, logit_bias=((20, 100.0),), stop_token_ids=(20,))),
    )
    assert (len(short.completion_ids), len(long.completion_ids)) == (1, 8)
    assert (cut.completion_ids, cut.message["content"], cut.finish_reason) == ((20,), "", "stop")


def test_a_stop_string_waits_for_the_tokens_that_there_must_be():
    model = policy()
    letter = model.tokenizer.convert_tokens_to_ids("a")
    always = Sampling(max_tokens=20, logit_bias=((letter, 100.0),), stop=("aa",))
    (soon,) = answers(model, continuing(PROMPT, always))
    assert (len(soon.completion_ids), soon.message["content"]) == (2, "")
    (late,) = answers(model, continuing(PROMPT, Sampling(**{**always.non_defaults(), "min_tokens": 6})))
    assert len(late.completion_ids) == 6
    assert late.message["content"] == "aaaa"

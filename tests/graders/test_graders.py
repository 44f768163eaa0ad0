"""OpenAI's graders: what each makes of an answer, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from etude.core.call import ChatRequest, Completion, Usage
from etude.core.errors import EngineError, RequestError
from etude.graders.formula import Formula
from etude.graders.grader import Grade, Grader, sample_of
from etude.graders.similarity import METRICS, common_subsequence
from etude.graders.spec import GraderSpec
from etude.graders.template import GraderError, rendered
from etude.inference.embedded import EmbeddedEngine
from etude.models.tiny import TinyShape, build_policy, build_tokenizer

SPEC: TypeAdapter[Any] = TypeAdapter(GraderSpec)
ITEM = {"answer": "Four", "parts": [{"n": 2}, {"n": 3}]}
CHECK = {
    "type": "string_check",
    "name": "same",
    "input": "{{ sample.output_text }}",
    "reference": "{{item.answer}}",
}


async def grade(spec: dict[str, Any], text: str = "four", judges: Any = None, item: Any = None) -> Grade:
    return await Grader(SPEC.validate_python(spec), judges or {}).grade(item or ITEM, sample_of(text))


@pytest.mark.parametrize(
    ("operation", "text", "score"),
    [
        ("eq", "Four", 1.0),
        ("eq", "four", 0.0),
        ("ne", "four", 1.0),
        ("like", "It is Four.", 1.0),
        ("like", "It is four.", 0.0),
        ("ilike", "It is four.", 1.0),
    ],
)
async def test_string_checks(operation: str, text: str, score: float) -> None:
    assert await grade(CHECK | {"operation": operation}, text) == Grade(score, {"same": score})


@pytest.mark.parametrize(
    ("metric", "expected"),
    # By hand. Of 22 and 21 characters 20 are common; of the n-grams 5 of 6, 3 of 5, 1 of 4 and 0 of 3.
    [
        ("fuzzy_match", 40 / 43),
        ("bleu", (5 / 6 * 4 / 6 * 2 / 5 * 1 / 4) ** 0.25),
        ("gleu", 9 / 18),
        ("rouge_1", 10 / 12),
        ("rouge_2", 6 / 10),
        ("rouge_3", 2 / 8),
        ("rouge_4", 0.0),
        ("rouge_l", 10 / 12),
    ],
)
async def test_text_similarity(metric: str, expected: float) -> None:
    spec = {"type": "text_similarity", "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}
    item = {"answer": "the cat is on the mat"}
    result = await grade(spec | {"evaluation_metric": metric}, "the cat sat on the mat", item=item)
    assert result.score == pytest.approx(expected)


@given(st.text("ab c", max_size=12), st.text("ab c", max_size=12))
def test_similarities_are_shares_and_the_subsequence_is_that_of_the_table(first: str, second: str) -> None:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    assert common_subsequence(first, second) == table[-1][-1]
    assert all(0 <= metric(first, second) <= 1 + 1e-9 for metric in METRICS.values())


async def test_python_runs_in_the_sandbox() -> None:
    source = "def grade(sample, item):\n    return len(item['parts']) / (1 + sample['output_json']['n'])"
    spec = {"type": "python", "name": "share", "source": source}
    assert (await grade(spec, '{"n": 3}')).score == 0.5
    for body, said in [
        ("return 1 / 0", "ZeroDivisionError"),
        ("return 'good'", "'good'"),
        ("return float('nan')", "finite"),
        (
            "import socket; socket.create_connection(('127.0.0.1', 9)); return 1.0",
            "network|socket|refused|not allowed|forbid",
        ),
        ("open('/etc/passwd').read(); return 1.0", "passwd"),
    ]:
        with pytest.raises(GraderError, match=said) as caught:
            await grade(spec | {"source": f"def grade(sample, item):\n    {body}"})
        assert caught.value.problem == "python_grader_runtime_error"


class _Judge:
    """Answers what it is told to, one text after the other."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.requests = list(answers), list[ChatRequest]()

    async def complete(self, request: ChatRequest) -> Completion:
        self.requests.append(request)
        if not self.answers:
            raise EngineError("the judge is out")
        return Completion({"role": "assistant", "content": self.answers.pop(0)}, usage=Usage(10, 2))


JUDGE = {
    "type": "score_model",
    "name": "judge",
    "model": "strict",
    "range": [0, 10],
    "input": [
        {"role": "developer", "content": "Grade {{ item.answer }}."},
        {"role": "user", "content": {"type": "input_text", "text": "{{ sample.output_text }}"}},
    ],
    "sampling_params": {
        "temperature": 0.5,
        "max_completions_tokens": 50,
        "seed": 3,
        "reasoning_effort": "low",
    },
}


async def test_a_model_grades_and_is_asked_again_when_its_answer_cannot_be_used() -> None:
    judge = _Judge("fine!", '{"reasoning": "", "score": 11}', '{"reasoning": "it is so", "score": 7}')
    result = await grade(JUDGE, judges={"strict": judge.complete})
    assert result == Grade(7.0, {"judge": 7.0}, {"strict": 36})
    first = judge.requests[0]
    assert (
        first.messages[0]["content"].startswith("Grade Four.\n\n") and first.messages[1]["content"] == "four"
    )
    assert (first.sampling.temperature, first.sampling.max_tokens, first.sampling.seed) == (0.5, 50, 3)
    assert first.template_options == {"reasoning_effort": "low"}
    schema = json.loads(first.sampling.constraint.text)
    assert schema["properties"]["score"] == {"type": "number", "minimum": 0, "maximum": 10}
    assert "not a number from 0 to 10" in judge.requests[2].messages[-1]["content"]
    for answers, problem in [(["no"] * 3, "model_grader_parse_error"), ([], "model_grader_server_error")]:
        with pytest.raises(GraderError) as caught:
            await grade(JUDGE, judges={"strict": _Judge(*answers).complete})
        assert caught.value.problem == problem


LABELS = {
    "type": "label_model",
    "name": "kind",
    "model": "strict",
    "input": [{"role": "user", "content": "{{ sample.output_text }}"}],
    "labels": ["right", "wrong", "rude"],
    "passing_labels": ["right"],
}


async def test_a_model_gives_a_label_which_passes_or_does_not() -> None:
    judge = _Judge(
        *(f'{{"reasoning": "", "label": "{label}"}}' for label in ("right", "rude", "odd", "wrong"))
    )
    assert [(await grade(LABELS, judges={"strict": judge.complete})).score for _ in range(3)] == [
        1.0,
        0.0,
        0.0,
    ]
    assert "'odd', and not one of right, wrong, rude" in judge.requests[3].messages[-1]["content"]
    schema = json.loads(judge.requests[0].sampling.constraint.text)
    assert schema["properties"]["label"] == {"enum": ["right", "wrong", "rude"]}
    with pytest.raises(ValidationError, match="'good' is not among labels: right, wrong, rude"):
        SPEC.validate_python(LABELS | {"passing_labels": ["good"]})


@pytest.mark.parametrize("spec", [JUDGE | {"sampling_params": {}}, LABELS], ids=["score", "label"])
async def test_a_judge_that_knows_nothing_answers_in_form(spec: dict[str, Any]) -> None:
    tokenizer = build_tokenizer(["yes"], vocab_size=300)
    engine = EmbeddedEngine(build_policy(tokenizer, 1, TinyShape(max_context=4096)))
    asked = list[ChatRequest]()

    async def complete(request: ChatRequest) -> Completion:
        asked.append(request)
        return await engine.complete(request)

    try:
        result = await grade(spec, judges={"strict": complete})
    finally:
        await engine.close()
    low, high = spec.get("range", [0, 1])
    assert low <= result.score <= high and len(asked) == 1


def test_graders_that_are_not_there_are_refused_by_name() -> None:
    with pytest.raises(
        ValidationError, match=r"'endpoint' found using 'type' does not match .*'label_model'"
    ):
        SPEC.validate_python({"type": "endpoint", "name": "mine", "url": "http://127.0.0.1"})


async def test_several_graders_are_one_by_a_formula() -> None:
    spec = {
        "type": "multi",
        "graders": {"same": CHECK | {"operation": "ilike"}, "judge": JUDGE},
        "calculate_output": "0.5 * same + min(judge / 10, 0.25) ^ 2",
    }
    judge = _Judge('{"reasoning": "", "score": 5}')
    result = await grade(spec, judges={"strict": judge.complete})
    assert result == Grade(0.5625, {"same": 1.0, "judge": 5.0}, {"strict": 12})
    with pytest.raises(GraderError, match="no value"):
        await grade(spec | {"graders": {"same": CHECK | {"operation": "eq"}}, "calculate_output": "1 / same"})


async def test_a_single_grader_of_several_has_its_name() -> None:
    spec = {"type": "multi", "graders": CHECK | {"operation": "ilike"}, "calculate_output": "1 - same"}
    assert (await grade(spec)).score == 0.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("__import__('os')", "has"),
        ("same.real", "has"),
        ("(lambda: 1)()", "has"),
        ("other + 1", "'other', which is no grader"),
        ("abs(same, same)", "takes one number"),
        ("1 +", "cannot be read"),
        ("9" * 400, "cannot be read"),
        ("-" * 1999 + "1", "cannot be read"),
        ("1+" * 1500 + "1", "2000 characters"),
    ],
)
def test_a_formula_is_arithmetic_and_nothing_else(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Formula(text, ["same"])
    with pytest.raises(ValidationError):
        spec = {"type": "multi", "graders": {"same": CHECK | {"operation": "eq"}}, "calculate_output": text}
        SPEC.validate_python(spec)


def test_formulas_have_the_values_of_arithmetic() -> None:
    formula = Formula("max(a, b, 3) - floor(a) ^ 2 / ceil(b) + abs(-a) * sqrt(4) + log(exp(1))", ["a", "b"])
    assert formula.value({"a": 2.5, "b": 1.5}) == pytest.approx(3 - 4 / 2 + 5 + 1)
    for text in ("1 / a", "9 ^ 9 ^ 9 ^ 9", "sqrt(-1)"):
        with pytest.raises((ArithmeticError, ValueError)):
            Formula(text, ["a"]).value({"a": 0.0})


def test_templates_read_paths_and_say_what_is_missing() -> None:
    values = {"item": ITEM, "sample": sample_of(json.dumps({"x": [1, 2]}))}
    text = "{{ item.parts[1].n }} {{item.parts.0.n}} {{ sample.output_json.x }} {{ sample.output_tools }}"
    assert rendered(text, values) == "3 2 [1, 2] []"
    for text, problem in [
        ("{{ item.gone }}", "invalid_variable_error"),
        ("{{ item.parts[7] }}", "invalid_variable_error"),
    ]:
        with pytest.raises(GraderError) as caught:
            rendered(text, values)
        assert caught.value.problem == problem
    with pytest.raises(GraderError, match="not JSON") as caught:
        rendered("{{ sample.output_json.x }}", {"item": {}, "sample": sample_of("text")})
    assert caught.value.problem == "sample_parse_error"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"type": "label_model"}, "label_model"),
        ({"operation": "regex"}, "eq"),
        ({"operation": "eq", "input": "{{ output }}"}, "no variable"),
        ({"operation": "eq", "typo": 1}, "not permitted"),
        ({"type": "text_similarity", "evaluation_metric": "cosine"}, "embeds texts"),
        ({"type": "text_similarity", "evaluation_metric": "meteor"}, "WordNet"),
        ({"type": "python", "source": "def grade(:"}, "no Python"),
        ({"type": "python", "source": "x = 1"}, "defines no function"),
        ({"type": "python", "source": "def grade(s, i): ...", "image_tag": "2025-05-08"}, "image_tag"),
        (JUDGE | {"range": [1, 0]}, "lower one"),
        (JUDGE | {"input": []}, "at least 1"),
        (
            {"type": "multi", "graders": {"a b": CHECK | {"operation": "eq"}}, "calculate_output": "1"},
            "formula",
        ),
    ],
)
def test_wrong_graders_are_refused(changed: dict[str, Any], said: str) -> None:
    base = CHECK if changed.get("type", "string_check") in ("string_check", "text_similarity") else {}
    with pytest.raises(ValidationError, match=said):
        SPEC.validate_python({**base, **changed})

"""The audit of chat templates: which conversations are extended, and which message is at fault."""

from __future__ import annotations

import pytest

from etude.models.template import ChatTemplate
from etude.preflight.drift import SHAPES, audit
from tests.models.tiny_models import CHATML, FORGETFUL, SEALED, tokenizer

RESTLESS = CHATML.replace(
    "{{ message.content }}\n</tool_response>",
    "{{ message.content if loop.last else 'seen' }}\n</tool_response>",
)
"""Results of tools are cut short once they have been seen."""


def audited(style):
    words = tokenizer(style)
    end = "<|end|>" if style is None else "<|im_end|>"
    template = ChatTemplate(words, frozenset({words.eos_token_id, words.convert_tokens_to_ids(end)}))
    return {finding.what: (finding.status, finding.detail) for finding in audit(template).items}


@pytest.mark.parametrize("style", [None, CHATML, SEALED], ids=["tiny", "chatml", "sealed"])
def test_a_plain_template_extends_every_shape(style):
    found = audited(style)
    assert list(found)[5:] == [shape.name for shape in SHAPES]
    assert {status for status, _ in found.values()} == {"ok"}
    assert found["a single turn"][1] == "renders"


def told(style):
    return {what: detail for what, (status, detail) in audited(style).items() if status == "warning"}


def test_thoughts_that_are_dropped_make_branches_on_purpose():
    assert not told(FORGETFUL)
    found = audited(FORGETFUL)
    again = "its thinking is left out once the user speaks again"
    assert found["thinking before an answer"][1].startswith(
        f"a new branch on purpose: message 2, role assistant: {again}; message 4, role assistant: {again} ("
    )
    assert "message 2, role assistant" in found["thinking before a tool call"][1]
    assert found["thinking"] == ("ok", "separated, dropped once the user speaks again")


def test_the_way_of_reading_is_said():
    found = audited(CHATML)
    assert found["answers are read by"] == ("ok", "hermes, by a response template of Etude")
    assert found["conversations are extended by"] == ("ok", "the difference of the template's renderings")
    assert found["tool calls"] == ("ok", "understood")
    assert found["thinking"] == ("ok", "the template knows none")
    assert found["system messages"] == ("ok", "as they are")


def test_a_result_that_is_cut_short_is_at_fault():
    found = told(RESTLESS)
    assert len(found) == 4
    assert "message 3, role tool" in found["a tool call and its result"]
    assert all("role tool: rewritten" in detail for detail in found.values())

"""Chat templates as Ollama writes prompts."""

from __future__ import annotations

import pytest

from etude.export.modelfile import modelfile, turns_of
from tests.models import families
from tests.models.tiny_models import CHATML, SEALED, tokenizer

OTHERS = {"gemma", "gemma3", "gptoss", "llama3_2", "muse_glimmer", "phi3", "phi3_5"}
"""Families whose turns are not simply one after the other: the system's words go into the user's, the day of
the prompt is named, the end of a conversation has a token of its own."""

CONVERSATION = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two\n\n2"},
    {"role": "user", "content": '<three> "four"'},
]

GO = r"""{{- range $i, $m := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}
{{- if eq .Role "system" }}{{- "<|im_start|>system\n" }}{{- .Content }}
{{- "<|im_end|>\n" }}
{{- else if eq .Role "user" }}{{- "<|im_start|>user\n" }}{{- .Content }}
{{- "<|im_end|>\n" }}
{{- else if eq .Role "assistant" }}{{- "<|im_start|>assistant\n" }}{{- .Content }}
{{- if not $last }}{{- "<|im_end|>\n" }}{{- end }}
{{- end }}
{{- if and $last (ne .Role "assistant") }}{{- "<|im_start|>assistant\n" }}{{- end }}
{{- end }}"""
"""ChatML. Go's text/template writes from it, and from those of the other families, what Jinja does."""


def test_chatml_for_ollama():
    words = tokenizer(CHATML)
    ends = words.convert_tokens_to_ids(["<|end|>", "<|im_end|>"])
    assert modelfile(words, ends, "sums.gguf") == (
        "FROM ./sums.gguf\n"
        "# The model's own chat template, without tools and thinking: for those there is `etude serve`.\n"
        f'TEMPLATE """{GO}"""\n'
        'PARAMETER stop "<|end|>"\n'
        'PARAMETER stop "<|im_end|>"\n'
    )


@pytest.mark.parametrize("name", [*families.FAMILIES, *families.OWN])
def test_families_are_translated_exactly_or_not_at_all(name: str):
    words = families.words(name)
    turns = turns_of(words)
    assert (turns is None) == (name in OTHERS)
    if turns is not None:
        prompt = words.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
        added = words.bos_token if words("a")["input_ids"][0] == words.bos_token_id else ""
        assert added + turns.render(CONVERSATION) == prompt


def test_words_that_a_template_puts_before_conversations_without_a_system_message():
    turns = turns_of(families.words("qwen2_5"))
    assert turns is not None
    assert turns.default.startswith("<|im_start|>system\nYou are Qwen")
    assert (
        '{{- if and (eq $i 0) (ne .Role "system") }}{{- "<|im_start|>system\\nYou are Qwen' in turns.as_go()
    )


@pytest.mark.parametrize(
    "template",
    [
        SEALED,
        CHATML.replace("{{ message.content }}", "{{ message.content | upper }}"),
        "{{ strftime_now('%d %B') }}" + CHATML,
        "{{ raise_exception('only tools here') }}",
    ],
)
def test_what_is_not_one_turn_after_the_other_is_left_to_ollama_and_said(template: str):
    words = tokenizer(CHATML)
    kept = words.chat_template
    try:
        words.chat_template = template
        text = modelfile(words, [1], "sums.gguf")
    finally:
        words.chat_template = kept
    assert "TEMPLATE" not in text
    assert "is not translated" in text

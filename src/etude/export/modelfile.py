"""A Modelfile: how Ollama talks to a GGUF file.

Ollama writes prompts by a template of Go's, and knows a few families' by heart. A chat template that puts
messages one after the other is translated; it is rendered in both ways first, and has to come out the same.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

_MARKS = ("QSYSTEMQ", "QFIRSTQ", "QANSWERQ", "QSECONDQ")
"""Contents that no template has text of."""
_CONVERSATIONS = ("u", "su", "uau", "suau", "suauau")
"""Those that a translation is tried on: system, user, assistant."""
_ROLES = {"s": "system", "u": "user", "a": "assistant"}

_UNKNOWN = """# The chat template of this model is not translated. Ollama guesses one from that in the file:
# compare them before you rely on it (ollama show --template NAME).
"""
_TRANSLATED = (
    "# The model's own chat template, without tools and thinking: for those there is `etude serve`.\n"
)


@dataclass(frozen=True, slots=True)
class Turns:
    """A chat template that puts messages one after the other: what stands around each, by role."""

    before: dict[str, str]
    after: dict[str, str]
    default: str
    """In front of a conversation without a system message."""
    answer: str
    """Where the model goes on."""

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt, as the translation would write it."""
        turns = [f"{self.before[m['role']]}{m['content']}{self.after[m['role']]}" for m in messages]
        first = "" if messages[0]["role"] == "system" else self.default
        return "".join([first, *turns, self.answer])

    def as_go(self) -> str:
        """The same as a template of Go's; texts are constants in it, so that no white space is lost."""
        lines = ["{{- range $i, $m := .Messages }}", "{{- $last := eq (len (slice $.Messages $i)) 1 }}"]
        if self.default:
            lines.append(
                f'{{{{- if and (eq $i 0) (ne .Role "system") }}}}{_text(self.default)}{{{{- end }}}}'
            )
        for word, role in zip(("if", "else if", "else if"), _ROLES.values(), strict=True):
            lines.append(f'{{{{- {word} eq .Role "{role}" }}}}{_text(self.before[role])}{{{{- .Content }}}}')
            after = _text(self.after[role])
            lines.append(f"{{{{- if not $last }}}}{after}{{{{- end }}}}" if role == "assistant" else after)
        lines.append("{{- end }}")
        lines.append(f'{{{{- if and $last (ne .Role "assistant") }}}}{_text(self.answer)}{{{{- end }}}}')
        return "\n".join([*filter(None, lines), "{{- end }}"])


def _text(constant: str) -> str:
    # Strings of JSON are strings of Go.
    return f"{{{{- {json.dumps(constant, ensure_ascii=False)} }}}}" if constant else ""


def modelfile(tokenizer: Any, stop_ids: Collection[int], file: str) -> str:
    """The text of a Modelfile for a GGUF file beside it, with the tokens that end the model's turns."""
    lines = [f"FROM ./{file}\n"]
    turns = turns_of(tokenizer)
    if turns is None or '"""' in turns.as_go():
        lines.append(_UNKNOWN)
    else:
        lines += [_TRANSLATED, f'TEMPLATE """{turns.as_go()}"""\n']
    stops = tokenizer.convert_ids_to_tokens(sorted(stop_ids))
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}\n" for stop in stops]
    return "".join(lines)


def turns_of(tokenizer: Any) -> Turns | None:
    """The turns of a tokenizer's chat template; None where it does not put messages one after the other."""
    if "strftime_now" in str(tokenizer.chat_template):
        return None  # It names the day of the prompt.
    try:
        turns = _taken_apart(tokenizer)
        for roles in _CONVERSATIONS:
            messages = [{"role": _ROLES[role], "content": f"{n}: one\n\ntwo"} for n, role in enumerate(roles)]
            if turns.render(messages) != _rendered(tokenizer, messages, answer=True):
                return None
    except (TemplateError, ValueError):
        return None
    return turns


def _taken_apart(tokenizer: Any) -> Turns:
    """Read off what stands around marked contents. Raises ValueError where a content is changed or moved."""
    system, first, answer, second = (
        {"role": role, "content": mark}
        for role, mark in zip(("system", "user", "assistant", "user"), _MARKS, strict=True)
    )
    head, between_su, between_ua, between_au, tail = _around(tokenizer, [system, first, answer, second], True)
    alone, after_user = _around(tokenizer, [first], False)
    after_answer = _around(tokenizer, [first, answer], False)[-1]
    before_user = _without(between_au, after_answer)
    return Turns(
        before={"system": head, "user": before_user, "assistant": _without(between_ua, after_user)},
        after={
            "system": _without_end(between_su, before_user),
            "user": after_user,
            "assistant": after_answer,
        },
        default=_without_end(alone, before_user),
        answer=_without(tail, after_user),
    )


def _around(tokenizer: Any, messages: Sequence[dict[str, str]], answer: bool) -> list[str]:
    """The texts before, between and after the contents of messages."""
    text = _rendered(tokenizer, messages, answer=answer)
    places = [(text.index(m["content"]), len(m["content"])) for m in messages]
    ends = [(0, 0), *places, (len(text), 0)]
    return [text[place + length : following] for (place, length), (following, _) in pairwise(ends)]


def _rendered(tokenizer: Any, messages: Sequence[dict[str, str]], *, answer: bool) -> str:
    """A prompt without the token that llama.cpp too puts in front of each."""
    text = str(tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=answer))
    begins = tokenizer.bos_token
    adds_it = begins is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return text.removeprefix(begins) if adds_it else text


def _without(text: str, start: str) -> str:
    if not text.startswith(start):
        raise ValueError("a turn ends in different ways")
    return text.removeprefix(start)


def _without_end(text: str, end: str) -> str:
    if not text.endswith(end):
        raise ValueError("a turn begins in different ways")
    return text.removesuffix(end)

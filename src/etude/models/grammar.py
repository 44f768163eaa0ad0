"""Grammars of answers: constraints compiled for one tokenizer, by llguidance."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np

from etude.core.call import Constraint, Sampling
from etude.core.errors import ImpossibleCall
from etude.core.json_text import read_json
from etude.models.distribution import Adjuster, Adjustment, Bits, bitset_words

_WHITESPACE = r"[ ]?|\n[ \t]{0,16}"
"""Whitespace between parts of JSON, limited because an uncertain model could write it forever."""
_THINK = ("<think>", "</think>")
"""The tags around a model's thoughts, which come before the constrained answer."""
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_SCHEMA_ERROR = re.compile(r"failed to compile JSON schema: (.*)")
FORM = "response_format"
"""The request field that asks for a constraint, whatever its kind."""


@dataclass(frozen=True, eq=False)
class Grammars:
    """Compiles the grammars of a model's answers."""

    tokenizer: Any
    stop_ids: Collection[int]
    """The tokens that may end an answer, where its grammar allows an end."""
    vocabulary: int

    def shaper(self, sampling: Sampling, prompt: Sequence[int]) -> Adjuster | None:
        """Return the shaper of an answer to a prompt, or None if the model's own distributions apply.

        Raises ImpossibleCall, with the reason, for a constraint that cannot be satisfied, and for tokens that
        the model does not have.
        """
        named = {
            "stop_token_ids": sampling.stop_token_ids,
            "logit_bias": [token for token, _ in sampling.logit_bias],
        }
        for param, tokens in named.items():
            if tokens and max(tokens) >= self.vocabulary:
                raise ImpossibleCall(
                    f"{param} has the token {max(tokens)}, and the model's are below {self.vocabulary}",
                    param=param,
                )
        if not Adjuster.is_needed(sampling):
            return None
        if sampling.constraint is None:
            return Adjuster(sampling, prompt, self.stop_ids)
        text, kind = self.text(sampling.constraint, prompt), sampling.constraint.kind
        first, allowed = self._cached_compile(text, kind)
        return Adjuster(sampling, prompt, self.stop_ids, first.deep_copy(), allowed)

    def text(self, constraint: Constraint, prompt: Sequence[int]) -> str:
        """Return the Lark grammar of all answers to a prompt, including thoughts before and the end after.

        Another engine that uses llguidance, such as vLLM, draws from the distributions of `shaper` with it.
        Raises ImpossibleCall as `shaper` does.
        """
        text, before, after, rules = lark_grammar_from(constraint), "", "", []
        if self._think_ids is not None:
            begin, end = self._think_ids
            # A prompt may end inside a thought that the answer continues.
            marks = (token == begin for token in reversed(prompt) if token in (begin, end))
            before = "thought " if next(marks, False) else f"(<[{begin}]> thought)? "
            rules = [f"thought: THOUGHT <[{end}]> /\\s*/", f"THOUGHT: {lark_without(_THINK[1])}"]
        # Other engines know only one token that ends an answer, the tokenizer's own.
        if ends := sorted({*self.stop_ids} - {self.tokenizer.eos_token_id}):
            after = f" ({' | '.join(f'<[{token}]>' for token in ends)})?"
        if before or after:
            text = "\n".join([f"start: {before}answer{after}", *rules, f"answer: %lark {{\n{text}\n}}"])
        spelled = _ESCAPE.sub(lambda code: chr(int(code[1], 16)), constraint.text).replace("\\", "")
        if any(token in spelled for token in self.tokenizer.get_added_vocab()):
            # llguidance would otherwise allow only the special token there, and then refuse it.
            text = f'%llguidance {{"no_forcing": true}}\n{text}'
        self._cached_compile(text, constraint.kind)
        return text

    def replay(
        self, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]
    ) -> list[Adjustment] | None:
        """Return the shape of each token of a sampled answer. Raises errors as `shaper` does.

        Returns None if the answer breaks its constraint, as another engine's may in its whitespace.
        """
        shaper = self.shaper(sampling, prompt) or Adjuster(Sampling(), prompt)
        shapes: list[Adjustment] = []
        for token in answer:
            shapes.append(shaper.shape())
            shaper.take(token)
            if shaper.matcher is not None:
                if not shaper.matcher.consume_token(token):
                    return None
                shaper.allowed = _bits(shaper.matcher, self.vocabulary)
        return shapes

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds in the middle of a text; a special token adds its name."""
        # llguidance marks special tokens with the byte 0xff, and decodes it to nothing.
        return bytes(self._ll_tokenizer.decode_bytes([token])) or b"\xff"

    @cached_property
    def _think_ids(self) -> tuple[int, int] | None:
        """The tokens around thoughts, or None if the model has none."""
        added = self.tokenizer.get_added_vocab()
        return (added[_THINK[0]], added[_THINK[1]]) if all(sign in added for sign in _THINK) else None

    @cached_property
    def _cached_compile(self) -> Any:
        # An agent's calls repeat a few constraints.
        return lru_cache(maxsize=256)(self._compile)

    def _compile(self, text: str, kind: str) -> tuple[Any, Bits]:
        """Return a matcher at the start of an answer, and the tokens that may come first."""
        from llguidance import LLMatcher, LLParserLimits

        refused = f"the answer cannot be held to its {kind}"
        limits = LLParserLimits(verbose_errors=False)
        grammar = LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0, limits=limits)
        allowed = _bits(matcher, self.vocabulary) if not matcher.is_error() else np.empty(0)
        error = matcher.get_error().strip() if matcher.is_error() else ""
        is_void = error.startswith("NoExtensionBias")  # No token may come first.
        if error and not is_void:
            of_schema = _SCHEMA_ERROR.search(error)
            raise ImpossibleCall(f"{refused}: {(of_schema[1] if of_schema else error)[:500]}", param=FORM)
        if is_void or not allowed.any():
            raise ImpossibleCall(f"{refused}: there is no answer of that form", param=FORM)
        return matcher, allowed

    @cached_property
    def _ll_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self.tokenizer, n_vocab=self.vocabulary, eos_token=sorted(self.stop_ids))
        except ValueError as error:
            raise ImpossibleCall(
                f"answers of this model cannot be held to a form, because its tokenizer is of a kind that "
                f"llguidance does not know: {error}",
                param=FORM,
            ) from error


def advance(shapers: Sequence[tuple[Adjuster, int]], vocabulary: int) -> None:
    """Add one sampled token to each shaper, and compute the tokens that its grammar allows next."""
    for shaper, token in shapers:
        shaper.take(token)
    bound = [(shaper, token) for shaper, token in shapers if shaper.matcher is not None]
    if not bound:
        return
    bits = np.empty((len(bound), bitset_words(vocabulary)), np.uint32)
    executor = _executor()
    executor.consume_token_par([(shaper.matcher, token) for shaper, token in bound])
    rows = [(shaper.matcher, row) for row, (shaper, _) in enumerate(bound)]
    executor.unsafe_compute_mask_ptr(rows, bits.ctypes.data, bits.strides[0], len(bound))
    for (shaper, _), own in zip(bound, bits, strict=True):
        shaper.allowed = own


def _bits(matcher: Any, vocabulary: int) -> Bits:
    bits = np.empty(bitset_words(vocabulary), np.uint32)
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    return bits


def lark_grammar_from(constraint: Constraint) -> str:
    """Convert a constraint to llguidance's Lark. Raises ImpossibleCall if its text does not fit its kind."""
    text = constraint.text
    match constraint.kind:
        case "json_object":
            return f"start: {json_rule({'type': 'object'})}"
        case "json_schema":
            schema = _parse(constraint)
            if not isinstance(schema, dict | bool):
                raise ImpossibleCall(f"a JSON schema is an object, found {text[:80]}", param=FORM)
            return f"start: {json_rule(schema)}"
        case "regex":
            return f"start: {_regex(text)}"
        case "choice":
            choices = _parse(constraint)
            texts = isinstance(choices, list) and [each for each in choices if isinstance(each, str)]
            if not texts or texts != choices:
                raise ImpossibleCall(
                    f"choices are a JSON list of at least one text, found {text[:80]}", param=FORM
                )
            return f"start: {' | '.join(map(lark_literal, texts))}"
        case "grammar":
            return text


def _parse(constraint: Constraint) -> Any:
    try:
        return read_json(constraint.text)
    except ValueError as error:
        raise ImpossibleCall(f"the {constraint.kind} is not JSON: {error}", param=FORM) from None


def json_rule(schema: dict[str, Any] | bool, *, lenient: bool = False) -> str:
    """Return a Lark rule for JSON of a schema; `lenient` drops the parts that cannot be enforced."""
    fields = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
    options = {"whitespace_pattern": _WHITESPACE, "lenient": lenient}
    return f"%json {json.dumps({**fields, 'x-guidance': options})}"


def lark_literal(text: str) -> str:
    """Return a text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def lark_without(text: str) -> str:
    """Return a Lark terminal for any text that does not contain `text`."""
    return f"/(?s:.*)/ & ~{_regex(f'(?s:.*){re.escape(text)}(?s:.*)')}"


def _regex(pattern: str) -> str:
    from llguidance import LLMatcher

    body = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]
    return str(body["lark_grammar"]).removeprefix("start: ")


@cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor()

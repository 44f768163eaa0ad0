"""A model without its weights: tokenizer, chat template, context length, and tokens that end answers.

Also tool choices as constraints: grammars for answers that call tools in the template's syntax.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from etude.core.call import ChatRequest, Constraint, Sampling
from etude.core.errors import ImpossibleCall, RequestError
from etude.core.message import Tool
from etude.models.architecture import original_length
from etude.models.grammar import FORM, Grammars, json_rule, lark_grammar_from, lark_literal, lark_without
from etude.models.source import cached_folder, local_path
from etude.models.template import CallForm, ChatTemplate
from etude.models.weights import loading

_DIGITS_TOGETHER = re.compile(r"Ġ?\d\d|Ġ\d")


@dataclass(frozen=True, slots=True)
class TextCodec:
    """Converts a model's text to tokens and back, without its weights."""

    tokenizer: Any
    template: ChatTemplate
    stop_ids: frozenset[int]
    """The tokens that end a turn."""
    max_context: int
    """Maximum tokens of prompt and completion together; a guess if the config has no limit."""
    vocabulary: int
    """All token ids are below this number."""
    grammars: Grammars
    """Compiles the constraints on the model's answers."""

    @classmethod
    def create(cls, tokenizer: Any, config: Any, generation: Any) -> Self:
        """Create from a model's tokenizer, config and optional generation config. Raises as `load` does."""
        text = config.get_text_config()
        # Added tokens do not count: some models come with one that never appears in a text.
        if (has := tokenizer.vocab_size) > text.vocab_size:
            raise RequestError(
                f"the tokenizer of '{tokenizer.name_or_path}' has {has} tokens, and its model "
                f"{text.vocab_size} (its config's vocab_size): get tokenizer and model from one place"
            )
        size = int(text.vocab_size)
        ends = _stop_ids(tokenizer, size, generation, config)
        context = original_length(text) or int(getattr(text, "max_position_embeddings", None) or 4096)
        template, grammars = ChatTemplate(tokenizer, ends), Grammars(tokenizer, ends, size)
        return cls(tokenizer, template, ends, context, size, grammars)

    @classmethod
    def load(cls, source: str | Path) -> Self:
        """Load the tokenizer and config of a causal LM, without its weights.

        Raises RequestError if there is no such model or it cannot be used for chat.
        """
        with loading(source) as (name, file, config):
            tokenizer, generation = load_tokenizer(name, file), load_generation_config(name)
        return cls.create(tokenizer, config, generation)


def load_tokenizer(name: str, file: Mapping[str, str]) -> Any:
    """Load the tokenizer of a model inside a `loading` block.

    A GGUF file names its tokenizer's way to split text, and transformers falls back to GPT-2's if it does not
    know that way. A vocabulary without digits in sequence needs a split at every digit.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **file)
    if file and not any(map(_DIGITS_TOGETHER.match, tokenizer.get_vocab())):
        cuts = tokenizer.backend_tokenizer.pre_tokenizer
        if isinstance(cuts, ByteLevel) and cuts.use_regex:
            digits = Digits(individual_digits=True)
            tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, cuts])
    return tokenizer


def load_generation_config(name: str) -> Any:
    """Return the generation config of a model inside a `loading` block, or None if it has no such file.

    transformers ignores a broken file, which may name the tokens that end a turn. Here it is an error.
    """
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(name)
    except OSError:
        folder = local_path(name) or cached_folder(name)
        if folder is not None and (folder / "generation_config.json").is_file():
            raise
        return None


def _stop_ids(tokenizer: Any, vocabulary: int, *sources: Any) -> frozenset[int]:
    """Return the tokens that end an assistant's turn, from the model's configs `sources` and its tokenizer.

    A model cannot sample tokens outside its vocabulary, so they are left out. Raises RequestError if none of
    the sources names another one.
    """
    ids: set[int] = set()
    for source in (*sources, tokenizer):
        named = getattr(source, "eos_token_id", None)
        ids.update([named] if isinstance(named, int) else named or [])
    if not (known := frozenset(token for token in ids if 0 <= token < vocabulary)):
        odd = f" in its vocabulary of {vocabulary}, only {sorted(ids)}" if ids else ""
        raise RequestError(
            f"the model '{tokenizer.name_or_path}' names no end-of-turn token (eos_token_id){odd}; set it in "
            "the model's generation config, or choose a chat model"
        )
    return known


_EMPTY_THOUGHT = re.compile(r"^\s*<think>\s*</think>\s*")


def constrained_sampling(request: ChatRequest, template: ChatTemplate) -> Sampling:
    """Return a request's sampling parameters, with the constraint that its tools and tool choice imply.

    Raises ImpossibleCall if the model's syntax of tool calls cannot be constrained.
    """
    own, tools, choice = request.sampling.constraint, list(request.tools), request.tool_choice
    if not tools:
        if choice not in ("auto", "none"):
            raise ImpossibleCall(
                f"tool_choice is {choice}, but the request has no tools", param="tool_choice"
            )
        return request.sampling
    is_free = choice == "auto" and request.parallel_tool_calls and not any(map(_is_strict, tools))
    if is_free and own is None:
        return request.sampling
    form = template.call_form
    if form is None:
        if choice == "none":
            return request.sampling  # The answer is not parsed for calls.
        wanted = "" if choice == "auto" else f"tool_choice {choice}, "
        raise ImpossibleCall(
            f"{wanted}strict tools, one call at a time, and answers of a form beside tools need tool calls "
            "whose arguments are JSON, and the model's chat template does not write them so; offer the tools "
            "with tool_choice auto and without strict",
            param=_binding(request),
        )
    if choice == "none" and own is not None:
        return request.sampling
    constraint = Constraint("grammar", _answer_grammar(request, template, form))
    return replace(request.sampling, constraint=constraint)


def _binding(request: ChatRequest) -> str:
    """Return the field of a request with tools that requires more than free text or free calls."""
    if request.tool_choice != "auto":
        return "tool_choice"
    if any(map(_is_strict, request.tools)):
        return "tools"
    return FORM if request.parallel_tool_calls else "parallel_tool_calls"


def _is_strict(tool: Tool) -> bool:
    return bool(tool["function"].get("strict"))


def _answer_grammar(request: ChatRequest, template: ChatTemplate, form: CallForm) -> str:
    added = template.tokenizer.get_added_vocab()
    choice, own = request.tool_choice, request.sampling.constraint
    prefix = _EMPTY_THOUGHT.sub("", form.prefix)
    if choice == "none":
        return f"start: TEXT\nTEXT: {_text(prefix, added, _binding(request))}"
    name = choice.removeprefix("function:")
    tools = [tool for tool in request.tools if name in (choice, tool["function"]["name"])]
    if not tools:
        names = ", ".join(tool["function"]["name"] for tool in request.tools)
        raise ImpossibleCall(
            f"tool_choice names the tool {name!r}, and the request has {names}", param="tool_choice"
        )
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        called, between = lark_literal(tool["function"]["name"]), _literals(form.between, added)
        # llguidance ignores schema features that it does not support, unless the tool is strict.
        schema = {"type": "object", **(tool["function"].get("parameters") or {})}
        arguments = json_rule(schema, lenient=not _is_strict(tool))
        rules.append(f"call_{number}: {called} {between} {arguments}")
    is_one = form.separator is None or not request.parallel_tool_calls or name != choice
    more = "" if is_one else f" ({_literals(form.separator or '', added)} call)*"
    rules.append(f"calls: {_literals(prefix, added)} call{more} {_literals(form.suffix, added)}")
    if choice != "auto":
        return "\n".join(["start: calls", *rules])
    if own is None:
        text = _text(prefix, added, _binding(request))
        return "\n".join(["start: TEXT calls?", f"TEXT: {text}", *rules])
    if own.kind == "grammar":
        raise ImpossibleCall(
            "a grammar cannot be kept beside tools; send the request without tools", param=FORM
        )
    answer = lark_grammar_from(own).removeprefix("start: ")
    return "\n".join([f"start: calls | answer\nanswer: {answer}", *rules])


def _text(prefix: str, added: Mapping[str, int], param: str) -> str:
    """Return a terminal for text without the marker that starts calls; `param` is the field that needs it."""
    begin = prefix.strip()
    sign = next((token for token in sorted(added, key=len) if begin.startswith(token)), begin)
    if not sign:
        raise ImpossibleCall(
            "the model's chat template writes nothing before the names of tools, so calls cannot be "
            "told from text; use tool_choice auto without strict, or required",
            param=param,
        )
    return lark_without(sign)


def _literals(text: str, added: Mapping[str, int]) -> str:
    """Return a text in Lark syntax: added tokens by id, and literals between them."""
    pattern = "|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)"
    parts = enumerate(re.split(f"({pattern})", text))
    # Added tokens are at odd positions.
    return " ".join(f"<[{added[part]}]>" if at % 2 else lark_literal(part) for at, part in parts if part)

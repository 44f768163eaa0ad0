"""The chat template: messages to tokens.

A conversation's tokens are kept and extended. Only new messages are rendered and tokenised, so sampled
tokens stay exactly as they were sampled.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from etude.core.call import Call, ChatRequest, Completion, continues
from etude.core.conversion import Encoder
from etude.core.errors import RequestError
from etude.core.message import Message, Tool, message_text
from etude.core.sample import shared_length
from etude.models.answer_parsing import RendererReader
from etude.models.family import Family, find_family, probed_turn
from etude.models.rendering import (
    ARGUMENTS,
    MORE,
    NAME,
    PROBES,
    QUESTION,
    RESULT,
    THOUGHT,
    TOOL,
    Options,
    Rendering,
)

_SHOWN_CHARACTERS = 60
_CALL = re.compile(rf'{NAME}(.*?){{\s*"count":\s*1,\s*"text":\s*"{ARGUMENTS["text"]}"\s*}}', re.DOTALL)
"""Matches a probe's call; the group is the text between its name and its arguments."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, and why they do not extend the earlier tokens, if they do not."""

    ids: tuple[int, ...]
    fault: str = ""
    """The part that the template now writes differently, in words that are the same in all conversations."""
    drifted: bool = False
    """Whether it starts anew for another reason than the family's design, which drops earlier thinking."""


Transcript = tuple[tuple[int, ...], tuple[bool, ...]]
"""Token ids of a finished conversation, and for each whether the assistant would have sampled it."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a conversation's text, which is cut where the assistant's turns start and end."""

    before: str
    """The end-of-turn token just before the text, or nothing."""
    text: str
    is_sampled: bool = False
    end: str = ""
    """The end-of-turn token that ends a sampled text."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The text around the names and JSON arguments of an answer's tool calls.

    An answer with one call is `prefix NAME between ARGUMENTS suffix` and the end-of-turn token. With two
    calls it is `prefix NAME between ARGUMENTS separator NAME between ARGUMENTS suffix` and that token.
    """

    prefix: str
    """Starts where the prompt ends. In families that always write thinking, it contains an empty thought."""
    between: str
    suffix: str
    separator: str | None
    """None if answers of the family have at most one call."""


class ChatTemplate:
    """A tokenizer's chat template: renders prompts and finished conversations."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int]) -> None:
        """`tokenizer` is a `transformers` tokenizer, `stop_ids` the tokens that end an assistant's turn.

        Raises RequestError if the tokenizer has no chat template.
        """
        self.tokenizer = tokenizer
        self.rendering = Rendering(tokenizer, stop_ids)
        self.decode = self.rendering.decode
        self.stop_ids = stop_ids
        self._families = lru_cache(maxsize=32)(self._find_family)

    def family(self, options: Options | None = None) -> Family:
        """Return how answers are read and conversations extended under the template's options."""
        settled = self.rendering.adapt_options(options) if options else {}
        return self._families(json.dumps(dict(settled), sort_keys=True))

    def _find_family(self, settled: str) -> Family:
        options, name = json.loads(settled), None
        if options and isinstance(usual := self.family().reader, RendererReader):
            name = usual.name
        return find_family(self.rendering, options, name)

    def prompt(self, request: ChatRequest) -> Prompt:
        """Return the prompt of a request, which extends an earlier call's tokens wherever that is possible.

        Raises ImpossibleCall if the template refuses the messages or does not know an option.
        """
        continued = [call for call in request.earlier if continues(request.messages, call)]
        messages = list(request.messages)
        for each in continued:  # A client may have sent answers back without their thinking.
            index = len(each.request.messages)
            if each.completion is not None and not messages[index].get("reasoning_content"):
                thinking = each.completion.message.get("reasoning_content")
                messages[index] = messages[index] | ({"reasoning_content": thinking} if thinking else {})
        # Among calls of the same length, the agent continued from the last one.
        call = max(reversed(continued), key=lambda call: len(call.request.messages), default=None)
        text = self.rendering.text(messages, request.tools, request.template_options, ask=True)
        if call is None:
            return Prompt(self.rendering.ids(text))
        completion = call.completion
        if completion is None or completion.prompt_ids is None or not completion.completion_ids:
            return Prompt(self.rendering.ids(text), "role assistant: its tokens are not known", drifted=True)
        extended = self._extension(request, messages, call, completion, text)
        if extended is not None:
            return Prompt(extended)
        return Prompt(self.rendering.ids(text), *self._fault(request, messages, call))

    def transcript(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Transcript:
        """Return the tokens of a finished conversation. Raises errors as `require_written` does.

        A message with `weight` 0 counts as not sampled, as in OpenAI's training files.
        """
        pieces = _split_turns(self.rendering, messages, tools)
        ids, sampled = list[int](), list[bool]()
        encoded = self.rendering.encode([piece.before + piece.text for piece in pieces])
        for piece, own in zip(pieces, encoded, strict=True):
            new = self.rendering.after(piece.before, piece.text, own)
            ids += new
            sampled += [piece.is_sampled] * len(new)
        return tuple(ids), tuple(sampled)

    def require_written(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Raise RequestError if a finished conversation cannot be trained on as it is.

        The template may render a turn differently once the conversation continues, or write an answer
        incompletely. Raises ImpossibleCall if the template refuses the messages.
        """
        _split_turns(self.rendering, messages, tools)

    def completion_ids(self, text: str) -> tuple[int, ...]:
        """Return the token ids of an answer that was written, not sampled, with its end of turn."""
        return self.rendering.ids(text + self._end_of_turn)

    @cached_property
    def encoder(self) -> Encoder:
        """Tokenises training data that was never sampled."""

        def prompt(messages: Sequence[Message]) -> tuple[int, ...]:
            return self.prompt(ChatRequest(tuple(messages))).ids

        return Encoder(prompt, self.completion_ids, self.transcript)

    @cached_property
    def call_form(self) -> CallForm | None:
        """How the template writes tool calls; None if it writes none, or their arguments are not JSON."""
        turns = [probed_turn(self.rendering, PROBES[kind], {}) for kind in ("a call", "two calls")]
        single, double = ([] if turn is None else _CALL.split(turn[1]) for turn in turns)
        if len(single) != 3:
            return None
        prefix, between, suffix = single
        is_alike = len(double) == 5 and [*double[:2], double[3]] == [prefix, between, between]
        return CallForm(prefix, between, suffix, double[2] if is_alike else None)

    def drops_thinking(self, *, at_once: bool = False) -> bool:
        """Return whether the template drops earlier thinking once the user speaks again, or `at_once`, when
        the result of a call follows."""
        kind, following = ("thinking and a call", RESULT) if at_once else ("thinking", MORE)
        text = self.rendering.text_or_none([QUESTION, PROBES[kind], following], [TOOL] * at_once, {})
        return self.rendering.thinking_key is not None and text is not None and THOUGHT not in text

    def _extension(
        self,
        request: ChatRequest,
        messages: Sequence[Message],
        call: Call,
        completion: Completion,
        longer: str,
    ) -> tuple[int, ...] | None:
        """Return the earlier tokens plus the new messages' tokens, or None if the template cannot extend.

        `messages` belong to the request and `longer` is their rendering; `completion` belongs to `call`.
        """
        prompt_ids, completion_ids = completion.prompt_ids or (), completion.completion_ids or ()
        # Use the tools of the earlier call: its tokens were made with them, and may show them.
        before = (call.request.tools, call.request.template_options)
        spoken = messages[: len(call.request.messages) + 1]
        thinking = spoken[-1].get("reasoning_content")
        if thinking and self.rendering.thinking_key is not None and thinking not in longer:
            return None  # The tokens contain thinking that the template drops.
        family = self.family(request.template_options)
        calls = [each for message in spoken for each in message.get("tool_calls") or () if each.get("id")]
        names = {each["id"]: {"name": each["function"]["name"]} for each in calls}
        new = [
            self.rendering.for_template(names.get(message.get("tool_call_id"), {}) | message)
            for message in messages[len(spoken) :]
        ]
        if before == (request.tools, request.template_options):
            extended = family.extend(prompt_ids, completion_ids, new, request.tools)
            if extended is not None:
                return extended
        asked = self.rendering.text(spoken[:-1], *before, ask=True)
        closed = self.rendering.text(spoken, *before, ask=False)
        end = self.rendering.end_of_turn(asked, closed, longer)
        if end is None or not closed.startswith(asked):
            return None
        if completion_ids[-1] not in self.stop_ids:
            return prompt_ids + completion_ids + self.rendering.ids(longer[end[0] :])
        token, text = longer[slice(*end)], longer[end[1] :]
        if end[0] >= len(closed) and self.rendering.end_tokens[token] != completion_ids[-1]:
            return None  # The model expected a message of another kind.
        return (
            prompt_ids + completion_ids + self.rendering.after(token, text, self.rendering.ids(token + text))
        )

    def _fault(self, request: ChatRequest, messages: Sequence[Message], call: Call) -> tuple[str, bool]:
        """Return why the request does not extend the tokens of `call`, and whether that is drift."""
        tools, options = call.request.tools, call.request.template_options
        if list(tools) != list(request.tools):
            return "tools: other tools than before are offered", True
        if dict(options) != dict(request.template_options):
            return "template options: other values than before are set", True
        spoken = messages[: len(call.request.messages) + 1]
        now = self.rendering.text(messages, tools, options, ask=False)
        closed = self.rendering.text(spoken, tools, options, ask=False)
        # A rendering may end with text that belongs to no message, and only appears at the very end.
        parts = (self.rendering.text_or_none(spoken[:end], tools, options) for end in range(1, len(spoken)))
        ends = [shared_length(part or "", closed) for part in parts]
        index = sum(end <= shared_length(closed, now) for end in ends)
        message = spoken[index]
        is_over = any(later.get("role") not in ("assistant", "tool") for later in messages[index + 1 :])
        is_meant = self.drops_thinking(at_once=not is_over)
        thinking = message.get("reasoning_content")
        if message.get("role") == "assistant" and is_meant and (not thinking or thinking not in now):
            when = "once the user speaks again" if is_over else "as soon as it is over"
            return f"role assistant: its thinking is left out {when}", False
        calls = " with tool calls" if message.get("tool_calls") else ""
        return f"role {message.get('role')}{calls}: rewritten once the conversation goes on", True

    @cached_property
    def _end_of_turn(self) -> str:
        """The end-of-turn token that the template writes; a model may stop at others, too."""
        conversation = [QUESTION, PROBES["text"], MORE]
        asked = self.rendering.text(conversation[:1], (), {}, ask=True)
        closed = self.rendering.text(conversation[:2], (), {}, ask=False)
        longer = self.rendering.text_or_none(conversation, (), {}) or closed
        end = self.rendering.end_of_turn(asked, closed, longer)
        tokens = self.rendering.end_tokens
        return str(self.tokenizer.eos_token or next(iter(tokens))) if end is None else longer[slice(*end)]


def _split_turns(rendering: Rendering, messages: Sequence[Message], tools: Sequence[Tool]) -> list[_Piece]:
    """Cut a conversation into pieces. Raises errors as `ChatTemplate.require_written` does."""
    turns = [
        index
        for index, message in enumerate(messages)
        if message.get("role") == "assistant" and message.get("weight") != 0
    ]
    if 0 in turns:
        raise RequestError(
            "the conversation begins with an assistant's answer, which needs a prompt; put a user "
            "message before it, or give it the weight 0"
        )
    pieces: list[_Piece] = []
    for index in turns:
        asked = rendering.text(messages[:index], tools, {}, ask=True)
        for place, message in enumerate(messages[:index], start=1):
            for call in message.get("tool_calls") or ():
                if (name := call["function"]["name"]) not in asked:
                    raise RequestError(
                        f"message {place}: the model's chat template does not write the call of {name!r}; "
                        "choose a model whose template writes tool calls"
                    )
        pieces += _turn(rendering, pieces, messages, index, tools, asked)
    return pieces


def _turn(
    rendering: Rendering,
    earlier: Sequence[_Piece],
    messages: Sequence[Message],
    index: int,
    tools: Sequence[Tool],
    asked: str,
) -> tuple[_Piece, _Piece]:
    """Return the text since the assistant's last turn, and the text of the turn in message `index`.

    `earlier` has the pieces before it; `asked` is the rendering before the turn.
    """
    closed = rendering.text(messages[: index + 1], tools, {}, ask=False)
    done = "".join(piece.text for piece in earlier)
    ends = [end.span() for end in rendering.end_pattern.finditer(closed, len(asked))]
    end, written = (ends[0] if ends else None), closed
    if len(ends) != 1:
        # A continuation shows which token ends the turn: some templates also end the whole conversation.
        usual = RESULT if messages[index].get("tool_calls") else QUESTION
        following = messages[index + 1] if index + 1 < len(messages) else usual
        written = rendering.text_or_none([*messages[: index + 1], following], tools, {}) or closed
        end = rendering.end_of_turn(asked, closed, written)
        if end is None and ends:
            end, written = ends[-1], closed
    if not closed.startswith(asked):
        raise RequestError(
            f"message {index + 1}: the prompt ends with {asked[-_SHOWN_CHARACTERS:]!r}, after which the "
            "model's chat template does not write this answer; where that begins a thought, give the answer "
            "its reasoning_content, or choose another model"
        )
    if not asked.startswith(done) or end is None:
        raise RequestError(
            f"the chat template cannot extend a conversation at message {index + 1}; train on "
            "single turns instead"
        )
    # The prompt may contain the start of the answer, such as the marker of its thinking.
    before = [end.end() for end in rendering.end_pattern.finditer(asked)]
    begun = before[-1] if before else len(asked)
    _require_whole(messages[index], f"message {index + 1}", written[begun : end[0]], rendering)
    return (
        _Piece(earlier[-1].end if earlier else "", asked[len(done) :]),
        _Piece("", written[len(asked) : end[1]], is_sampled=True, end=written[slice(*end)]),
    )


def _require_whole(message: Message, where: str, written: str, rendering: Rendering) -> None:
    """Raise RequestError if the template does not write all parts of an answer.

    Whitespace is ignored: many templates add some around parts, and strip the content.
    """
    squeezed = _strip_spaces(written)
    said = {
        "content": message_text(message),
        "reasoning_content": message.get("reasoning_content") or "",
        "name": message.get("name") or "",
    }
    for field, text in said.items():
        if _strip_spaces(text) not in squeezed:
            raise RequestError(
                f"{where}: the model's chat template does not write all of {field}, so it would not be "
                f"learned: {text[:_SHOWN_CHARACTERS]!r}; leave it out, or put it into the content as the "
                "model should write it"
            )
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    names = [function["name"] for function in functions]
    for name in names:
        if squeezed.count(_strip_spaces(name)) < names.count(name):
            raise RequestError(
                f"{where}: the model's chat template does not write all calls of {name!r}, so they "
                "would not be learned; choose a model whose template writes tool calls, or put the calls "
                "into the content as the model should write them"
            )
    texts = [*said.values(), *(str(function["arguments"]) for function in functions)]
    if ends := next(filter(None, map(rendering.end_pattern.search, texts)), None):
        raise RequestError(
            f"{where}: it holds {ends[0]!r}, with which the model ends its turn, so it would learn to "
            "stop there; take it out"
        )


def _strip_spaces(text: str) -> str:
    return "".join(text.split())

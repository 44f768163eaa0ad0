"""The chat template: messages to tokens, and sampled text back to a message.

A conversation's tokens are kept and extended. Only what is new is rendered and tokenised, so that
what was sampled stays exactly as it was sampled.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from etude.core.call import Call, ChatRequest, continues
from etude.core.errors import EngineError, ImpossibleCall, RequestError
from etude.core.message import Message, Tool, is_text, text_of
from etude.models.call_form import PROBE_TOOL, CallForm, call_form, probe_answer
from etude.models.reply import parse_reply

_KEPT_TEXTS = 1024
"""Renderings that are remembered: the generations of one example begin with the same prompt."""
_QUESTION: Message = {"role": "user", "content": "?"}

Transcript = tuple[tuple[int, ...], tuple[bool, ...]]
"""Token ids of a finished conversation, and for each whether the assistant would have sampled it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The part of a conversation that a template writes differently once there is more of it.

    Therefore the prompt cannot go on from the conversation's tokens, and is rendered anew.
    """

    message: int | None
    """Index of the message, from 0; None where it is the list of tools."""
    reason: str
    """In words that are the same for all conversations, so that faults can be counted."""

    def __str__(self) -> str:
        return self.reason if self.message is None else f"message {self.message + 1}, {self.reason}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, and why they had to be rendered anew, if they had to."""

    ids: tuple[int, ...]
    fault: Fault | None = None
    """The part of the earlier conversation that the template writes differently now."""

    @property
    def drifted(self) -> bool:
        """Whether it could not go on from the tokens that there were."""
        return self.fault is not None


class ChatTemplate:
    """A tokenizer's chat template, both ways."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int]) -> None:
        """`tokenizer` is a `transformers` tokenizer, `stop_ids` the tokens that end an assistant's turn.

        Raises RequestError when the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise RequestError(
                f"the tokenizer of '{tokenizer.name_or_path}' has no chat template; choose an "
                "instruction-tuned model, or set the template in its tokenizer_config.json"
            )
        self.tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._end_tokens = {str(tokenizer.convert_ids_to_tokens(token)): token for token in sorted(stop_ids)}
        self._end_pattern = re.compile("|".join(map(re.escape, self._end_tokens)))
        added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self._added_pattern = re.compile("|".join(map(re.escape, added)) or "(?!)")
        self._rendered = lru_cache(maxsize=_KEPT_TEXTS)(self._render)
        self._tokenised = lru_cache(maxsize=_KEPT_TEXTS)(lambda text: self._tokenise([text])[0])

    def prompt(self, request: ChatRequest) -> Prompt:
        """The prompt of a request: an extension of an earlier call's tokens wherever that is possible."""
        continued = [call for call in request.earlier if continues(request.messages, call)]
        # Of calls that the messages continue alike, the last one is what the agent went on from.
        call = max(reversed(continued), key=lambda call: len(call.request.messages), default=None)
        extended = self._extension(request, call) if call is not None else None
        if extended is not None:
            return Prompt(extended)
        text = self._text(request.messages, request.tools, ask=True)
        return Prompt(self._tokenised(text), None if call is None else self._fault(request, call))

    def transcript(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Transcript:
        """Tokens of one finished conversation."""
        return self.transcripts([messages], tools)[0]

    def transcripts(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Tool] = ()
    ) -> list[Transcript]:
        """Tokens of finished conversations. It takes less time for many at once than for each by itself.

        Built turn by turn, as prompts and completions would be. A message with the `weight` 0 counts as
        not sampled, as in OpenAI's training files. Raises RequestError when the template
        renders a conversation differently once it has gone on.
        """
        turns = [
            (number, index)
            for number, messages in enumerate(conversations)
            for index, message in enumerate(messages)
            if message.get("role") == "assistant"
        ]
        asked = self._applied([conversations[number][:index] for number, index in turns], tools, ask=True)
        closed = self._applied(
            [conversations[number][: index + 1] for number, index in turns], tools, ask=False
        )
        talks: list[list[_Piece]] = [[] for _ in conversations]
        for (number, index), before, after in zip(turns, asked, closed, strict=True):
            talks[number] += self._turn(talks[number], conversations[number], index, tools, before, after)
        texts = list(dict.fromkeys(piece.before + piece.text for talk in talks for piece in talk))
        ids_of = dict(zip(texts, self._tokenise(texts), strict=True))
        return [self._joined(talk, ids_of) for talk in talks]

    def _turn(
        self,
        talk: Sequence[_Piece],
        messages: Sequence[Message],
        index: int,
        tools: Sequence[Tool],
        asked: str,
        closed: str,
    ) -> tuple[_Piece, _Piece]:
        """The text since the last turn of the assistant, and that of the turn, the message `index`.

        `talk` is the conversation until there, `asked` and `closed` the renderings before and after the turn.
        """
        done = "".join(piece.text for piece in talk)
        ends = list(self._end_pattern.finditer(closed, len(asked)))
        end = ends[0] if ends else None
        if len(ends) > 1:
            # How it goes on shows what ends a turn: some templates also end the whole conversation.
            following = messages[index + 1] if index + 1 < len(messages) else _QUESTION
            longer = self._text_or_none([*messages[: index + 1], following], tools) or closed
            end = self._end_of_turn(asked, closed, longer) or ends[-1]
        if not asked.startswith(done) or not closed.startswith(asked) or end is None:
            raise RequestError(
                f"the chat template cannot extend a conversation at message {index + 1}; train on "
                "single turns instead"
            )
        is_sampled = messages[index].get("weight") != 0
        return (
            _Piece(talk[-1].end if talk else "", asked[len(done) :]),
            _Piece("", closed[len(asked) : end.end()], is_sampled, end.group()),
        )

    def _joined(self, talk: Iterable[_Piece], ids_of: Mapping[str, tuple[int, ...]]) -> Transcript:
        ids: list[int] = []
        sampled: list[bool] = []
        for piece in talk:
            new = self._after(piece.before, piece.text, ids_of[piece.before + piece.text])
            ids += new
            sampled += [piece.is_sampled] * len(new)
        return tuple(ids), tuple(sampled)

    def completion_ids(self, text: str) -> tuple[int, ...]:
        """Token ids of an answer that was written and not sampled, its end of turn included."""
        return self._tokenised(text + self._closing)

    def parse(
        self, text: str, tools: Sequence[Tool], *, prompt_ids: Sequence[int] = (), first_call: int = 0
    ) -> Message:
        """The assistant message that sampled text stands for, its tool calls numbered from `first_call`."""
        has_own = getattr(self.tokenizer, "response_template", None)
        prompt = self.decode(prompt_ids) if has_own and prompt_ids else ""
        return parse_reply(self.tokenizer, text, tools, prompt, first_call)

    @cached_property
    def call_form(self) -> CallForm | None:
        """How the template writes tool calls; None where it has none, or their arguments are not JSON."""
        one = self._probed_turn(probe_answer(1))
        return None if one is None else call_form(one, self._probed_turn(probe_answer(2)))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included, exactly as it stands."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _extension(self, request: ChatRequest, call: Call) -> tuple[int, ...] | None:
        """The earlier tokens plus those of the new messages; None where the template cannot extend."""
        before = call.completion
        if before is None or before.prompt_ids is None or not before.completion_ids:
            return None
        spoken = request.messages[: len(call.request.messages) + 1]
        # With the tools of the earlier call: its tokens were made with them, and other tools may show.
        asked = self._text(spoken[:-1], call.request.tools, ask=True)
        closed = self._text(spoken, call.request.tools, ask=False)
        longer = self._text(request.messages, request.tools, ask=True)
        end = self._end_of_turn(asked, closed, longer)
        if end is None or not closed.startswith(asked):
            return None
        if before.completion_ids[-1] in self._stop_ids:
            text = longer[end.end() :]
            # After the token that ends the turn: some tokenizers look at what stands before.
            tail = self._after(end.group(), text, self._tokenised(end.group() + text))
        else:
            tail = self._tokenised(longer[end.start() :])
        return before.prompt_ids + before.completion_ids + tail

    def _fault(self, request: ChatRequest, call: Call) -> Fault:
        """Why the request, which continues a call, does not extend its tokens."""
        before, tools = call.completion, call.request.tools
        spoken = request.messages[: len(call.request.messages) + 1]
        if before is None or before.prompt_ids is None or not before.completion_ids:
            return Fault(len(spoken) - 1, "role assistant: its tokens are not known")
        if list(tools) != list(request.tools):
            return Fault(None, "tools: other ones than before are offered")
        now = self._text(request.messages, request.tools, ask=False)
        asked, closed = self._text(spoken[:-1], tools, ask=True), self._text(spoken, tools, ask=False)
        for then, seen in ((asked, spoken[:-1]), (closed, spoken)):
            changed = _common(then, now)
            for index, message in enumerate(seen):
                # A rendering may end in what is only written at the end of all: that is not the message's.
                if changed < _common(self._text_or_none(seen[: index + 1], tools) or "", then):
                    return Fault(index, f"role {_kind(message)}: rewritten once the conversation goes on")
        return Fault(len(spoken) - 1, f"role {_kind(spoken[-1])}: not written as it is asked for")

    def _after(self, before: str, text: str, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Of the token ids of `before` and `text` those of the text; `before` is a token that ends turns."""
        if not before:
            return ids
        return ids[1:] if ids[:1] == (self._end_tokens[before],) else self._tokenised(text)

    def _end_of_turn(self, asked: str, closed: str, longer: str) -> re.Match[str] | None:
        """The last end-of-turn token of the assistant's turn up to which `longer` repeats `closed`.

        `asked` is the rendering before the turn, `closed` that after it, `longer` one that goes on.
        """
        ends = self._end_pattern.finditer(closed, len(asked))
        return max(
            (end for end in ends if longer.startswith(closed[: end.end()])), key=re.Match.end, default=None
        )

    @cached_property
    def _closing(self) -> str:
        """The end-of-turn token that the template writes; a model may stop at others too."""
        talk = [_QUESTION, {"role": "assistant", "content": "!"}, _QUESTION]
        asked, closed = self._text(talk[:1], (), ask=True), self._text(talk[:2], (), ask=False)
        end = self._end_of_turn(asked, closed, self._text_or_none(talk, ()) or closed)
        return str(self.tokenizer.eos_token or next(iter(self._end_tokens))) if end is None else end.group()

    def _probed_turn(self, answer: Message) -> str | None:
        """The text in which the template answers a question, from the end of its prompt to that of the turn.

        None where the template refuses the answer.
        """
        try:
            asked = self._text([_QUESTION], [PROBE_TOOL], ask=True)
            closed = self._text([_QUESTION, answer], [PROBE_TOOL], ask=False)
        except EngineError:
            return None
        start = _common(asked, closed)
        if start < len(asked):
            # The prompt writes something, like an open `<think>`, that the answer leaves out.
            tokens = self._added_pattern.finditer(closed)
            start = next((token.start() for token in tokens if token.start() < start < token.end()), start)
        end = self._end_pattern.search(closed, start)
        return closed[start : end.start() if end else len(closed)]

    def _text_or_none(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str | None:
        """A rendering that is only a hint; None where the template refuses the messages."""
        try:
            return self._text(messages, tools, ask=False)
        except EngineError:
            return None

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], *, ask: bool) -> str:
        return self._rendered(json.dumps([messages, tools]), ask)

    def _render(self, conversation: str, ask: bool) -> str:
        messages, tools = json.loads(conversation)
        return self._applied([messages], tools, ask=ask)[0]

    def _applied(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Tool], *, ask: bool
    ) -> list[str]:
        """The renderings of conversations. Raises ImpossibleCall where the template refuses one."""
        from jinja2 import TemplateError

        try:
            if not all(conversations):
                raise ValueError("there is no message")
            texts = self.tokenizer.apply_chat_template(
                [[self._for_template(message) for message in messages] for messages in conversations],
                tools=list(tools) or None,
                add_generation_prompt=ask,
                tokenize=False,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            if len(conversations) != 1:
                # One by one, so that the error is about the one that is refused.
                return [self._text(messages, tools, ask=ask) for messages in conversations]
            raise ImpossibleCall(
                f"the model's chat template refused the messages ({type(error).__name__}: {error}); "
                f"roles: {[message.get('role') for message in conversations[0]]}"
            ) from error
        return [str(text) for text in texts]

    def _for_template(self, message: Message) -> Message:
        plain = _plain(message)
        return _with_objects(plain) if message.get("tool_calls") and not self._writes_arguments else plain

    @cached_property
    def _writes_arguments(self) -> bool:
        """Whether the template writes the arguments of tool calls as they are: it then needs them as text."""
        from jinja2 import TemplateError

        answer = _plain(probe_answer(1))
        try:
            text = self.tokenizer.apply_chat_template(
                [_QUESTION, _with_objects(answer)], tools=[PROBE_TOOL], tokenize=False
            )
        except (TemplateError, TypeError, KeyError, ValueError):
            return True
        return str(answer["tool_calls"][0]["function"]["arguments"]).replace('"', "'") in text

    def _tokenise(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        if not texts:
            return []
        return [tuple(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Of a conversation's text, cut where the assistant's turns begin and end."""

    before: str
    """The end-of-turn token that it follows, or nothing."""
    text: str
    is_sampled: bool = False
    end: str = ""
    """The end-of-turn token that ends a sampled text."""


def _common(first: str, second: str) -> int:
    """How many characters two texts have in common from the start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def _kind(message: Message) -> str:
    role = str(message.get("role"))
    thinks = message.get("reasoning_content") or "</think>" in str(message.get("content"))
    parts = ["thinking"] * bool(thinks) + ["tool calls"] * bool(message.get("tool_calls"))
    return f"{role} with {' and '.join(parts)}" if parts else role


def _plain(message: Message) -> Message:
    """Templates expect text, and tool arguments as an object where OpenAI's format has JSON text."""
    if not is_text(message):
        raise ImpossibleCall(
            f"the model takes text only, and a message of the role {message.get('role')!r} has other parts"
        )
    return {**message, "content": text_of(message)}


def _with_objects(message: Message) -> Message:
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**function, "arguments": arguments}}

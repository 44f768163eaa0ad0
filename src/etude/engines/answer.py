"""The interface of token engines, and how sampled tokens become a message, at once or streamed."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from etude.core.call import ChatRequest, Completion, Delta, Sampling
from etude.core.errors import EngineError, ImpossibleCall, PromptTooLong
from etude.core.message import Message
from etude.core.threads import call_off_loop
from etude.models.answer_parsing import Decode
from etude.models.grammar import FORM
from etude.models.template import ChatTemplate, Prompt
from etude.models.text_codec import TextCodec, constrained_sampling
from etude.wire.dialect import unsent_text


class TokenEngine(Protocol):
    """An engine that continues token ids."""

    @property
    def codec(self) -> TextCodec:
        """The model's tokenizer, chat template and grammars."""

    async def sample(self, request: ChatRequest) -> Completion:
        """Continue the request's prompt of token ids; `on_delta` gets each token as it is sampled.

        The message's content is the sampled text without the end of turn, cut before a stop string. Raises
        EngineError if sampling is impossible. Cancelling the call frees its resources.
        """

    async def complete(self, request: ChatRequest) -> Completion:
        """Sample one assistant message: `etude.engines.answer.sample_message` over `sample`."""

    async def close(self) -> None:
        """Free all resources; unfinished requests fail."""


def before_stop(ids: Sequence[int], stops: Sequence[str], held: int, decode: Decode) -> str | None:
    """Return the text before the earliest stop string, or None if it has none of them.

    Stop strings within the first `held` tokens, which `min_tokens` holds back, do not count.
    """
    if not stops:
        return None
    text = decode(ids)
    start = max(len(decode(ids[:held])) - max(map(len, stops)) + 1, 0) if held > 0 else 0
    positions = [position for stop in stops if (position := text.find(stop, start)) >= 0]
    return text[: min(positions)] if positions else None


_READ_EACH = 64
"""An answer of n tokens is parsed again after n / 64 more. The total time is then linear in its length."""
_MAY_BE_CALL = re.compile(r"^\s*[{\[]|<|\[(?:T|$)")
"""Matches where text may begin a tool call, in any model family's syntax."""
_MAY_BE_THOUGHT = re.compile(
    r"\s*(?:$|[<\[](?:[^>\]\s]{0,24}$|[^>\]]*(?:think|thought|channel|reason)))", re.I
)
"""Matches text that may turn out to begin a thought."""


async def sample_message(engine: TokenEngine, request: ChatRequest) -> Completion:
    """Sample one assistant message from an engine that continues token ids. Raises EngineError."""
    codec = engine.codec
    size = len(request.prompt or ()) + sum(len(str(part)) for part in (*request.messages, *request.tools))
    prompt, sampling = await call_off_loop(size, _prepare_request, codec, request)
    ids = prompt.ids
    on_delta = None if request.on_delta is None else AnswerStream(codec.template, request, ids).add
    try:
        completion = await engine.sample(replace(request, prompt=ids, sampling=sampling, on_delta=on_delta))
    except ImpossibleCall as error:
        if error.param == FORM and request.sampling.constraint is None:
            error.param = "tools"  # The grammar came from the tools.
        raise
    message = parse_message(
        codec.template, request, completion.message["content"], ids, completion.completion_ids or ()
    )
    # Tool calls that were cut off are `length`, as at endpoints.
    is_whole = completion.finish_reason == "stop"
    return replace(
        completion,
        message=message,
        finish_reason="tool_calls" if is_whole and message.get("tool_calls") else completion.finish_reason,
        drifted=prompt.drifted,
        fault=prompt.fault,
        constraint=None if sampling is request.sampling else sampling.constraint,
    )


def _prepare_request(codec: TextCodec, request: ChatRequest) -> tuple[Prompt, Sampling]:
    """Return a request's prompt, and how to sample its answer. Raises EngineError."""
    sampling = request.sampling
    if request.prompt is None:
        prompt, sampling = codec.template.prompt(request), constrained_sampling(request, codec.template)
    else:
        # A text prompt gets the tokenizer's own special tokens around it.
        given = request.prompt
        prompt = Prompt(tuple(codec.tokenizer(given)["input_ids"] if isinstance(given, str) else given))
    require_room(codec, prompt.ids)
    return prompt, sampling


def require_room(codec: TextCodec, ids: Sequence[int]) -> None:
    """Raise ImpossibleCall if a prompt is empty, fills the context, or has ids outside the vocabulary."""
    if not ids:
        raise ImpossibleCall("the prompt is empty: the model has nothing to continue", param="messages")
    if len(ids) >= codec.max_context:
        raise PromptTooLong(
            f"the model's context is {codec.max_context} tokens, but the prompt has {len(ids)}; shorten the "
            "conversation"
        )
    if (largest := max(ids)) >= codec.vocabulary:
        raise ImpossibleCall(
            f"token id {largest} is not in the vocabulary of {codec.vocabulary}; a token that was added to "
            "the tokenizer needs weights (resize_token_embeddings)",
            param="messages",
        )


def parse_message(
    template: ChatTemplate, request: ChatRequest, text: str, prompt: Sequence[int], ids: Sequence[int] = ()
) -> Message:
    """Parse sampled `text` into the message that it means. Raises EngineError.

    `ids` are the sampled tokens after `prompt`. If they do not match the text, which a stop text may have
    cut, the text is tokenised.
    """
    if request.prompt is not None:
        return {"role": "assistant", "content": text}
    sampled = tuple(ids[:-1] if ids and ids[-1] in template.stop_ids else ids)
    if not sampled or template.rendering.decode(sampled) != text:
        sampled = template.rendering.encode([text])[0]
    tools = () if request.tool_choice == "none" else request.tools
    answer = template.family(request.template_options).reader.read(prompt, sampled, tools)
    return answer.message(sum(len(message.get("tool_calls") or ()) for message in request.messages))


class AnswerStream:
    """Streams an answer to a request's `on_delta`, each piece once it is certain.

    Text that may turn out to be a tool call or a thought is held back. The completion has all text.
    """

    def __init__(self, template: ChatTemplate, request: ChatRequest, ids: tuple[int, ...]) -> None:
        """`ids` are the prompt of the request, which has an `on_delta`."""
        assert request.on_delta is not None
        self._on_delta = request.on_delta
        self._decode, self._stops = template.decode, request.sampling.stop
        self._stop_ids = template.stop_ids.union(request.sampling.stop_token_ids)
        self._template, self._request, self._prompt_ids = template, request, ids
        self._has_tools = bool(request.tools) and request.tool_choice != "none"
        begun = self._decode(ids[-8:]).rstrip()
        self._is_thinking = request.prompt is None and begun.endswith(("think>", "THINK]"))
        """Whether the prompt itself opens a thought."""
        self._ids: list[int] = []
        self._read_at = 0
        self._content = self._reasoning = ""

    def add(self, token: Delta) -> None:
        """Add the next token, and send a delta for it."""
        self._ids.append(token.ids[0])
        count, content, reasoning = len(self._ids), "", ""
        if count - self._read_at > count // _READ_EACH:
            self._read_at = count
            content, reasoning = self._certain()
        self._content, self._reasoning = self._content + content, self._reasoning + reasoning
        prompt_ids = self._prompt_ids if count == 1 else None
        self._on_delta(replace(token, content=content, reasoning=reasoning, prompt_ids=prompt_ids))

    def _certain(self) -> tuple[str, str]:
        """Return the new part of the content and of the reasoning that later tokens cannot change."""
        text = self._decode(self._ids[:-1] if self._ids[-1] in self._stop_ids else self._ids).rstrip("\ufffd")
        positions = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        begun = [size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
        text = text[: min(positions, default=len(text) - max(begun, default=0))]
        if self._request.prompt is not None:
            return text[len(self._content) :], ""
        try:
            message = parse_message(self._template, self._request, text, self._prompt_ids)
        except EngineError:
            return "", ""  # The text is incomplete; later tokens may complete it.
        content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
        thinks = bool(reasoning) or not (self._is_thinking or _MAY_BE_THOUGHT.match(content))
        if not thinks or message.get("tool_calls"):
            content = ""
        if self._has_tools and (held := _MAY_BE_CALL.search(content)):
            content = content[: held.start()]
        # The parser strips the spaces around text when there are calls or thoughts.
        content = "" if self._has_tools and content[:1].isspace() else content.rstrip()
        reasoning = reasoning if content else reasoning.rstrip()
        return unsent_text(content, self._content), unsent_text(reasoning, self._reasoning)

"""Tiny models, built from scratch in a second, for demos, examples and tests.

The model is a stock Llama of about 0.15 million parameters. Its byte-level tokenizer is trained on the
texts of its task, and its chat template supports tools. Nothing is downloaded.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from etude.core.errors import RequestError
from etude.core.message import Message, Tool
from etude.models.architecture import BUILDING
from etude.models.device import limit_threads
from etude.models.policy import Policy

CHAT_TEMPLATE = (
    "{%- if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }}"
    "{% if not loop.last %},{% endif %}{% endfor %}<|end|>{% endif %}"
    "{%- for message in messages %}<|{{ message.role }}|>"
    "{%- if message.content %}{{ message.content }}{% endif %}"
    "{%- if message.tool_calls %}{% for call in message.tool_calls %}"
    "<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Roles are single tokens, a turn ends with `<|end|>`, and tool calls have Hermes syntax."""

END = "<|end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>")


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Shape of a tiny Llama."""

    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    intermediate_size: int = 192
    max_context: int = 256
    initializer_range: float = 0.06
    """Standard deviation of the initial weights. A model this narrow learns to copy from its prompt in half
    the steps that it needs with the usual 0.02."""


def build_tokenizer(texts: Iterable[str], *, vocab_size: int = 512, splits: Sequence[str] = ()) -> Any:
    """Train a byte-level BPE tokenizer on `texts`.

    `splits` are regular expressions of pieces that must stay separate tokens, so that a policy has to
    choose each of them: a digit, or a row and a column of a board. Raises RequestError for a broken one.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    try:
        isolate = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splits]
    except Exception as error:  # The library has no class of its own for it.
        raise RequestError(f"`splits` {list(splits)} holds a broken regular expression: {error}") from error
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*isolate, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def conversation_texts(transcripts: Iterable[Sequence[Message]], tools: Sequence[Tool] = ()) -> Iterator[str]:
    """Yield the texts of conversations for `build_tokenizer`, with tool calls in `CHAT_TEMPLATE`'s syntax."""
    for tool in tools:
        yield tool["function"]["name"]
    for message in chain.from_iterable(transcripts):
        if message.get("content"):
            yield message["content"]
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            yield f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def build_policy(tokenizer: Any, seed: int, shape: TinyShape | None = None) -> Policy:
    """Create an untrained tiny Llama for `tokenizer`, with weights drawn from `seed`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = shape or TinyShape()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.max_context,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    limit_threads()
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return Policy(model, tokenizer, "tiny", torch.device("cpu"))

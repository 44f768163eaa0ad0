"""The workload of the GPU's benchmark: a model of real size with random weights, and sequences for it.

`SMALL` is the same with everything small, for a look on a CPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from learner_data import conversations, groups

from etude.core.sample import Sample
from etude.learner.tree import token_tree
from etude.models.policy import Policy
from etude.models.tiny import build_tokenizer

Shape = Callable[[random.Random], list[Sample]]


@dataclass(frozen=True)
class Scale:
    """All sizes."""

    name: str
    model: dict[str, Any]
    """Of a Qwen2."""
    shapes: dict[str, Shape]
    budgets: tuple[int, ...]
    """Tokens at a time, of which the fastest counts."""
    rows: tuple[int, ...]
    """Rows at a time, for TRL."""
    matrix: int
    """Side of the matrices that the rate is measured with."""
    prompt: int
    answer: int
    concurrencies: tuple[int, ...] = (1, 8, 64)
    pages: dict[str, int] = field(default_factory=dict)
    """Of continuous batching."""


FULL = Scale(
    name="0.5B",
    model={
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    shapes={
        "short": lambda choose: groups(choose, 8, prompt=(192, 320), completion=(384, 640)),
        "long": lambda choose: groups(choose, 1, prompt=(8192, 8192), completion=(512, 512)),
        "turns": lambda choose: conversations(choose, prompt=1024, answer=(384, 640), told=(512, 768)),
    },
    budgets=(16384, 32768, 65536),
    rows=(8, 2),
    matrix=8192,
    prompt=256,
    answer=128,
    pages={"page_size": 256, "num_blocks": 512, "max_batch_tokens": 8192},
)
SMALL = Scale(
    name="small",
    model={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    shapes={
        "short": lambda choose: groups(choose, 2, prompt=(12, 20), completion=(4, 12)),
        "long": lambda choose: groups(choose, 1, prompt=(128, 128), completion=(8, 8)),
        "turns": lambda choose: conversations(choose, prompt=32, answer=(4, 8), told=(4, 8)),
    },
    budgets=(2048,),
    rows=(8,),
    matrix=256,
    prompt=16,
    answer=4,
    concurrencies=(1, 2),
    pages={"page_size": 32, "num_blocks": 64, "max_batch_tokens": 64},
)


def policy_of(scale: Scale, device: torch.device, dtype: torch.dtype, **changes: Any) -> Policy:
    """A Qwen2 with random weights, that never stops by itself."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    tokenizer = build_tokenizer(["what is 1 plus 2? it is 3."], vocab_size=512)
    config = Qwen2Config(
        **(scale.model | changes),
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    policy = Policy(model, tokenizer, scale.name, device)
    policy.stop_ids = frozenset()
    return policy


@dataclass(frozen=True)
class Work:
    """The work of a step, without any padding."""

    tokens: int
    choices: int
    """Tokens that are trained on."""
    looks: int
    """Pairs of a token and one that it looks at."""

    def flops(self, policy: Policy) -> float:
        """Multiplications and additions of matrices: once forward, twice for the gradient."""
        config = policy.model.config
        weights = sum(one.numel() for one in policy.model.model.layers.parameters() if one.dim() == 2)
        heads = config.num_attention_heads * (config.hidden_size // config.num_attention_heads)
        head = config.vocab_size * config.hidden_size * self.choices
        attention = 2 * heads * config.num_hidden_layers * self.looks
        return 6.0 * (weights * self.tokens + head + attention)


def work_of(sequences: Sequence[Sample], *, tree: bool) -> Work:
    """Of sequences by themselves, or as a token tree."""
    choices = sum(sum(map(bool, one.loss_weights)) for one in sequences)
    if not tree:
        lengths = [len(one.ids) for one in sequences]
        return Work(sum(lengths), choices, sum(size * (size + 1) // 2 for size in lengths))
    made = token_tree([one.ids for one in sequences])
    return Work(len(made), choices, int(np.sum(made.depths + 1)))

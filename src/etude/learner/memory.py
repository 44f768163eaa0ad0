"""The memory that training takes, estimated from a model's numbers before anything is allocated.

`benchmarks/job_memory.py` compares the estimates with the peaks of real jobs.
"""

from __future__ import annotations

from dataclasses import dataclass

from etude.learner.head import held_logits
from etude.models.architecture import text_config
from etude.models.memory import shown_bytes
from etude.models.policy import Policy

_MOMENTS, _FLOAT32 = 8, 4
"""Bytes of AdamW's two moments, and of a float32 number."""
_HOLES = 1.8
"""Factor by which a CPU's heap grows more with LoRA weights: holes stay free between their small tensors."""
_OVERHEAD = 60_000_000
"""Bytes on a CPU that do not depend on the model."""
_CERTAIN = 0.8
"""The share of an estimate that is needed in any case: none of 54 estimates was a fifth above the peak."""

_KEPT = 1_200_000_000
"""Bytes that a pass on a CPU keeps for the gradient if the config sets no budget: more saved no time."""
_LEAST_TOKENS, _MOST_TOKENS = 1024, 16384


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Memory of one process in bytes."""

    weights: int
    copies: int
    """Copies of trained weights: the reference model's, and float32 copies of 16-bit weights."""
    moments: int
    """AdamW's moments."""
    gradients: int
    activations: int
    overhead: int

    @property
    def total(self) -> int:
        """The peak memory."""
        return self.weights + self.copies + self.to_come(has_moments=False)

    def to_come(self, *, has_moments: bool) -> int:
        """Return the rise of memory from before the first step to the peak."""
        moments = 0 if has_moments else self.moments
        return self.gradients + self.activations + self.overhead + moments

    def shown(self, *names: str) -> str:
        """Return some of the fields as text for people."""
        counts = {name: getattr(self, name) for name in names}
        return ", ".join(f"{shown_bytes(count)} of {name}" for name, count in counts.items() if count)

    def __str__(self) -> str:
        parts = self.shown("weights", "copies", "moments", "gradients", "activations", "overhead")
        return f"about {shown_bytes(self.total)} ({parts})"


def fits(needed: int, free: int) -> bool:
    """Return whether an estimate may fit into `free` bytes; False only if it certainly does not."""
    return needed * _CERTAIN <= free


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """The numbers of a model that decide how much memory its training takes."""

    weights: int
    """Bytes of all weights."""
    trained: int
    """Numbers that training changes."""
    size: int
    """Bytes of one number in a layer."""
    is_lora: bool
    layers: int
    width: int
    queries: int
    """Total width of all heads' queries."""
    keys: int
    """Total width of all heads' keys, equal to the width of their values."""
    inner: int
    """Width within an MLP, over all experts that a token uses."""
    vocabulary: int

    @classmethod
    def of(cls, policy: Policy) -> ModelNumbers:
        """Return the numbers of a policy, which may be an outline."""
        config = text_config(policy.model)
        width, heads = int(config.hidden_size), int(config.num_attention_heads)
        head = int(getattr(config, "head_dim", None) or width // heads)
        experts = getattr(config, "num_experts_per_tok", None)
        own = getattr(config, "moe_intermediate_size", None)
        inner = own * experts if experts and own else getattr(config, "intermediate_size", None)
        return cls(
            weights=sum(value.numel() * value.element_size() for value in policy.model.parameters()),
            trained=sum(value.numel() for value in policy.trainable().values()),
            size=policy.model.get_input_embeddings().weight.element_size(),
            is_lora=policy.is_lora,
            layers=int(config.num_hidden_layers),
            width=width,
            queries=heads * head,
            keys=int(getattr(config, "num_key_value_heads", None) or heads) * head,
            # Gemma 3n has one value per layer.
            inner=int(max(inner) if isinstance(inner, list) else inner or 4 * width),
            vocabulary=int(config.vocab_size),
        )

    def kept_by_a_layer(self, *, is_lean: bool = False) -> int:
        """Return the bytes of activations that a layer keeps per token for the gradient."""
        half = self.size < _FLOAT32
        # A norm computes in float32; if its weight is trained, its normed input is kept too.
        divided = 0 if self.is_lora or is_lean else self.size
        norm = self.width * (_FLOAT32 + divided + self.size)
        inner = (3 if is_lean else 4) * self.inner
        linear = self.size * (2 * self.queries + 2 * self.keys + inner)
        # LoRA weights are float32. With peft's own modules, each keeps its own copy of its input.
        has_copies = half and self.is_lora and not is_lean
        copies = _FLOAT32 * (5 * self.width + self.queries + self.inner) if has_copies else 0
        return 2 * norm + linear + copies

    def token_budget(self, is_lean: bool = False, *, on_gpu: bool) -> int:
        """Return the default number of tokens in a pass through the model."""
        kept = self.layers * self.kept_by_a_layer(is_lean=is_lean)
        return _MOST_TOKENS if on_gpu else min(max(_KEPT // kept, _LEAST_TOKENS), _MOST_TOKENS)

    def training(
        self,
        tokens: int = 0,
        choices: int = 0,
        is_lean: bool = False,
        *,
        on_gpu: bool,
        checkpointed: bool = False,
        reference: bool = False,
        parts: int = 1,
    ) -> TrainingMemory:
        """Return the memory of a process whose largest pass has `tokens`, of which `choices` are trained.

        `is_lean` is a pass without the model's own modules, as in `Learner.largest_pass`. `checkpointed`
        means gradient checkpointing, and `reference` a copy of the trained weights as they were. `parts` is
        the number of processes that share the weights.
        """
        kept = self.kept_by_a_layer(is_lean=is_lean) * tokens
        between = self.width * _FLOAT32 + self.queries * self.size if is_lean else self.width * self.size
        body = kept + self.layers * between * tokens if checkpointed else self.layers * kept
        activations = body + held_logits(self.vocabulary, choices, self.size, on_gpu)
        half = self.size < _FLOAT32 and not self.is_lora
        copies = self.trained * ((_FLOAT32 if half else 0) + (self.size if reference else 0))
        return TrainingMemory(
            weights=self.weights // parts,
            copies=copies // parts,
            moments=self.trained * _MOMENTS // parts,
            gradients=self.trained * _FLOAT32 // parts,
            activations=int(activations * (_HOLES if self.is_lora and not on_gpu else 1)),
            overhead=0 if on_gpu else _OVERHEAD,
        )

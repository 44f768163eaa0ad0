"""Llama's and Gemma's forward pass with a quarter of the operations, for a CPU, and for bfloat16 on CUDA.

A step of a small model takes as many microseconds as it has operations. Here, one matrix product computes all
projections of an input, and queries and keys turn as complex numbers. A layer's keys and values are stored in
one go, and attention of single tokens is two plain products. A prefix that rows share is read once for all of
them. Weights are copied.

In bfloat16, the states between layers, norms and rotary embeddings are in float32, as in the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from etude.engines.fused_weights import AfterNorm, FusedLayer, PackedLinear, fused_layer, is_gemma
from etude.engines.kv_slots import KvSlots, SlotLayer
from etude.engines.step_inputs import RaggedInputs, RowGroup, Spans
from etude.models.architecture import SLIDING, layer_kinds, text_config, without_lora

AttendSpans: TypeAlias = Callable[[torch.Tensor, SlotLayer, Spans, float, int | None], torch.Tensor]
"""Returns the attention [N, H, D] of queries [N, H, D] to a layer's slots, given a scale and a window."""


def flash_attention(
    query_NHD: torch.Tensor, held: SlotLayer, spans: Spans, scale: float, window: int | None
) -> torch.Tensor:
    """Return the attention of rows to their own slots, by CUDA's flash kernel for rows of any length.

    The kernel takes a row's first key by its place in memory, so the rows' slots may be anywhere.
    """
    slots, heads, columns, size = held.keys.shape
    keys, values = (
        each.as_strided(
            (slots * heads * columns - (heads - 1) * columns, heads, size), (size, columns * size, 1)
        )
        for each in (held.keys, held.values)
    )
    starts = functional.pad(spans.slots * (heads * columns), (0, 1))
    return torch.ops.aten._flash_attention_forward(  # type: ignore[no-any-return]
        *(query_NHD, keys, values, spans.ends, starts, spans.longest, columns, 0.0, True, False),
        scale=scale,
        seqused_k=spans.lengths,
        **({} if window is None else {"window_size_left": window - 1, "window_size_right": 0}),
    )[0]


class FusedLlama:
    """Computes the logits of the model's own forward pass, up to rounding, with LoRA weights."""

    @torch.no_grad()
    def __init__(self, model: Any, attend_spans: AttendSpans = flash_attention) -> None:
        """`can_fuse(model)` must be true. Make a new one, or `refresh` it, when the weights have changed."""
        inner = without_lora(model)
        self._attend_spans = attend_spans
        config, body = inner.config, inner.model
        attention = body.layers[0].self_attn
        self.dtype: torch.dtype = body.embed_tokens.weight.dtype
        self.groups: int = config.num_key_value_heads
        self.size: int = attention.head_dim
        self.key_size = self.groups * self.size
        """How many numbers a token's keys have in a layer."""
        self.scale: float = attention.scaling
        self.layers = [fused_layer(layer, config) for layer in body.layers]
        self.kinds = layer_kinds(inner)
        self._grouped = config.num_attention_heads > self.groups
        self._eps = config.rms_norm_eps
        device = body.embed_tokens.weight.device
        self._least = torch.tensor((self._eps * config.hidden_size) ** 0.5, device=device)
        self._window: int | None = getattr(text_config(model), "sliding_window", None)
        self._embedding = body.embed_tokens.weight.detach()
        self._is_gemma = is_gemma(model)
        root = torch.tensor(config.hidden_size**0.5, dtype=self._embedding.dtype, device=device)
        self._embedding_scale = root.float() if self._is_gemma else None
        self._head = AfterNorm(body.norm, [inner.lm_head])
        self._rotary = body.rotary_emb
        self._turns = dict.fromkeys(self.kinds, torch.zeros(0))

    @torch.inference_mode()
    def refresh(self, model: Any) -> None:
        """Take the weights of a model anew into the same memory, layer by layer. Its embedding must be where
        it was."""
        inner = without_lora(model)
        for mine, layer in zip(self.layers, inner.model.layers, strict=True):
            _copy_tensors(fused_layer(layer, inner.config), mine)
        _copy_tensors(AfterNorm(inner.model.norm, [inner.lm_head]), self._head)

    def __call__(self, inputs: RaggedInputs, kv: KvSlots, read: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, V] after the tokens at the places `read`."""
        turns = self._turns_at(inputs.position_N, kv.columns)
        places = kv.places(self.groups, inputs.slot_N, inputs.column_N)
        counts = [group.count for group in inputs.groups]
        x_NE = self.embed(inputs.ids_N)
        for kind, layer, held in zip(self.kinds, self.layers, kv.layers, strict=True):
            heads = self._heads(layer, x_NE, turns[kind])
            query_NGRD, new = heads.tensor_split((-2,), dim=2)
            held.by_token(self.groups, self.size, self.dtype).index_copy_(0, places, new.flatten(0, 1))
            if inputs.spans is not None:
                window = self._window if kind == SLIDING else None
                mixed = [self._attend_spans(query_NGRD.flatten(1, 2), held, inputs.spans, self.scale, window)]
            else:
                parts = zip(query_NGRD.split_with_sizes(counts), inputs.groups, strict=True)
                mixed = [self._attend(query, group, held, group.masks[kind]) for query, group in parts]
            x_NE = self._add(x_NE, layer.out(torch.cat(mixed).flatten(1)), layer.out_norm)
            gate, up = layer.gate_up.linear(self._norm(x_NE, layer.gate_up)).chunk(2, dim=1)
            gate = (
                functional.gelu(gate, approximate="tanh") if self._is_gemma else functional.silu(gate, True)
            )
            x_NE = self._add(x_NE, layer.down(gate.mul_(up)), layer.down_norm)
        return self._head.linear(self._norm(x_NE.index_select(0, read), self._head))

    def embed(self, ids_N: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer [N, E] in float32."""
        x_NE: torch.Tensor = self._embedding.index_select(0, ids_N).float()
        return x_NE if self._embedding_scale is None else x_NE.mul_(self._embedding_scale)

    def _heads(self, layer: FusedLayer, x_NE: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """Return a layer's queries, keys and values [N, G, R + 2, D] in the dtype of the weights."""
        heads = layer.qkv.linear(self._norm(x_NE, layer.qkv)).view(len(x_NE), self.groups, -1, self.size)
        turned = heads[:, :, :-1]
        if layer.head_norm is not None:
            torch.mul(functional.rms_norm(turned, (self.size,), eps=self._eps), layer.head_norm, out=turned)
        torch.view_as_complex(turned.view(*turned.shape[:-1], -1, 2)).mul_(turn)
        return heads.to(self.dtype)

    def _turns_at(self, position_N: torch.Tensor, most: int) -> dict[str, torch.Tensor]:
        """Return the complex rotary embedding [N, 1, 1, D / 2] of positions below `most`, by layer kind."""
        half, device = self.size // 2, position_N.device
        for kind, turns in self._turns.items():
            if len(turns) < most:
                own = (kind,) if isinstance(self._rotary.rope_type, dict) else ()
                position_1T = torch.arange(most, device=device)[None]
                cos, sin = self._rotary(torch.zeros(1, device=device), position_1T, *own)
                self._turns[kind] = torch.complex(cos[0, :, :half], sin[0, :, :half])
        return {kind: turns.index_select(0, position_N)[:, None, None] for kind, turns in self._turns.items()}

    def _attend(
        self, query: torch.Tensor, group: RowGroup, held: SlotLayer, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention of a group's rows, in the shape of their queries [., G, R, D]."""
        (rows, width), (slot, shared) = group.shape, group.prefix
        keys, values = held.of(group.slots, group.span, shared)
        if shared:
            prefix = held.of(slice(slot, slot + 1), shared)
            return _attend_with_prefix(query, prefix, (keys, values), mask, self.scale)
        if group.multiplies:
            keys_MDS = keys.flatten(0, 1).transpose(1, 2)
            scores_MRS = torch.baddbmm(mask, query.flatten(0, 1), keys_MDS, alpha=self.scale)
            return torch.bmm(scores_MRS.softmax(dim=-1), values.flatten(0, 1)).view(query.shape)
        if width == 1:
            return _flash_attention(query, keys, values, mask, self.scale)[0]
        query_NHD = query.flatten(1, 2)
        if group.padded is not None:
            query_NHD = query_NHD.index_select(0, group.padded[0])
        mixed_BHTD = functional.scaled_dot_product_attention(
            query_NHD.view(rows, width, -1, self.size).transpose(1, 2),
            keys,
            values,
            mask,
            scale=self.scale,
            enable_gqa=self._grouped,
        )
        mixed_NHD = mixed_BHTD.transpose(1, 2).flatten(0, 1)
        if group.padded is not None:
            mixed_NHD = mixed_NHD.index_select(0, group.padded[1])
        return mixed_NHD.view(query.shape)

    def _norm(self, x_NE: torch.Tensor, after: AfterNorm) -> torch.Tensor:
        """Return RMSNorm of the states; factors that are folded into the layer `after` are left out."""
        unit_NE = self._divide_by_length(x_NE)
        return unit_NE if after.scale is None else unit_NE.mul_(after.scale)

    def _divide_by_length(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Return vectors divided by their length, as RMSNorm does."""
        length_N1: torch.Tensor = torch.linalg.vector_norm(x_NE, dim=-1, keepdim=True)
        return x_NE / length_N1.hypot_(self._least)

    def _add(self, x_NE: torch.Tensor, y_NE: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """Add a linear layer's result to the states, normed first if `norm` is given."""
        return x_NE.add_(y_NE) if norm is None else x_NE.addcmul_(self._divide_by_length(y_NE), norm)


def _copy_tensors(source: Any, target: Any) -> None:
    if held := [*_tensors(target)]:
        torch._foreach_copy_(held, [*_tensors(source)])


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a part of a fused model, in order."""
    if isinstance(part, torch.Tensor):
        yield part
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
    elif isinstance(part, AfterNorm | PackedLinear):
        for value in vars(part).values():
            yield from _tensors(value)


def _attend_with_prefix(
    query_BGRD: torch.Tensor,
    prefix: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    mask_B11S: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return attention [B, G, R, D] of single tokens to the keys and values [1, G, L, D] of a prefix that all
    rows share, and to their `own` [B, G, S, D].

    All queries read the prefix together. The two results are averaged in float32, weighted by their sums of
    exponentials, which is exact up to rounding.
    """
    rows, groups, _, size = query_BGRD.shape
    query_1GTD = query_BGRD.transpose(0, 1).reshape(1, groups, -1, size)
    shared_1GTD, shared_1GT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query_1GTD, *prefix, scale=scale
    )
    own_BGRD, own_BGR = _flash_attention(query_BGRD, *own, mask_B11S, scale)
    shared_BGRD = shared_1GTD.view(groups, rows, -1, size).transpose(0, 1)
    shared_BGR = shared_1GT.view(groups, rows, -1).transpose(0, 1)
    weight_BGR1 = torch.sigmoid(shared_BGR - own_BGR)[..., None]
    return torch.lerp(own_BGRD.float(), shared_BGRD.float(), weight_BGR1)


def _flash_attention(
    query_BGRD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask_B11S: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of single tokens, and their scores' log-sum-exp [B, G, R] in float32."""
    heads = query_BGRD.shape[2]
    if heads == 1:  # The kernel takes half as long for two queries as for one.
        query_BGRD = query_BGRD.expand(-1, -1, 2, -1)
    mask_BGRS = mask_B11S.expand(-1, query_BGRD.shape[1], query_BGRD.shape[2], -1)
    mixed_BGRD, score_BGR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query_BGRD, keys, values, attn_mask=mask_BGRS, scale=scale
    )
    return mixed_BGRD[:, :, :heads], score_BGR[:, :, :heads]

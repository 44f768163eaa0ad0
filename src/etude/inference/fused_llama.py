"""Llama's and Gemma's forward pass with a quarter of the operations, for float32 and bfloat16 on a CPU.

A step of a small model takes as many microseconds as it has operations. Here, one matrix product computes all
projections of an input, and queries and keys turn as complex numbers. A layer's keys and values are stored in
one go, and attention of single tokens is two plain products. A prefix that rows share is read once for all of
them. Results go into existing memory, through existing views. Weights are copied.

In bfloat16, the states between layers, norms and rotary embeddings are in float32, as in the learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from etude.inference.fused_weights import AfterNorm, FusedLayer, PackedLinear, fused_layer, is_gemma, low_rank
from etude.inference.kv_slots import KvSlots, RaggedInputs, RowGroup, SlotLayer
from etude.models.architecture import layer_kinds, without_lora


class Scratch:
    """The workspace of a forward pass of N tokens: memory that it writes to, and views into it."""

    def __init__(self, memory: Sequence[torch.Tensor], groups: int, size: int) -> None:
        """`memory` is as `FusedLlama` allocates it. `groups` of heads share keys; `size` is a head's D."""
        self.x, self.length, self.scaled, self.turning = memory[:4]
        """In float32: [N, E], [N, 1], [N, E] and [N, G * (R + 2) * D] in the order of `FusedLayer.qkv`."""
        self.normed, self.heads, self.mixed, self.gate_up = memory[4:]
        """In the dtype of the weights: [N, E], [N, G * (R + 2) * D], [N, G * R * D] and [N, 2 * I]. In
        float32 the first two are `scaled` and `turning`."""
        by_group = self.heads.view(len(self.x), groups, -1, size)
        self.query, self.new = by_group[:, :, :-2], by_group[:, :, -2:].flatten(0, 1)
        """Queries [N, G, R, D]; keys and values [N * G, 2, D]."""
        self.turned = self.turning.view(by_group.shape)[:, :, :-1]
        """Queries and keys [N, G, R + 1, D]."""
        self.turned_complex = torch.view_as_complex(self.turned.view(*self.turned.shape[:-1], -1, 2))
        """The same as complex numbers [N, G, R + 1, D / 2]."""
        self.mixed_by_group = self.mixed.view(self.query.shape)
        self.gate, self.up = self.gate_up.chunk(2, dim=1)


class FusedLlama:
    """Computes the logits of the model's own forward pass, up to rounding, with LoRA weights."""

    @torch.no_grad()
    def __init__(self, model: Any) -> None:
        """`can_fuse(model)` must be true. Make a new one whenever the weights have changed."""
        inner = without_lora(model)
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
        self._least = torch.tensor((self._eps * config.hidden_size) ** 0.5)
        self._embedding = body.embed_tokens.weight.detach()
        self._embedding_low = low_rank(body.embed_tokens)
        self._is_gemma = is_gemma(model)
        root = torch.tensor(config.hidden_size**0.5, dtype=self._embedding.dtype)
        self._embedding_scale = root.float() if self._is_gemma else None
        self._head = AfterNorm(body.norm, [inner.lm_head])
        queries = config.num_attention_heads * self.size
        heads = queries + 2 * self.groups * self.size
        self._widths = config.hidden_size, 1, config.hidden_size, heads
        self._narrow_widths = config.hidden_size, heads, queries, 2 * config.intermediate_size
        self._rotary = body.rotary_emb
        self._turns = dict.fromkeys(self.kinds, torch.zeros(0))

    def __call__(self, inputs: RaggedInputs, kv: KvSlots, read: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, V] after the tokens at the places `read`."""
        room = Scratch(self._allocated(len(inputs.ids_N)), self.groups, self.size)
        turns = self._turns_at(inputs.position_N, kv.columns)
        places = kv.places(self.groups, inputs.slot_N, inputs.column_N)
        self.embed(inputs.ids_N, room)
        for kind, layer, held in zip(self.kinds, self.layers, kv.layers, strict=True):
            self._project(layer, room, turns[kind])
            held.by_token(self.groups, self.size, self.dtype).index_copy_(0, places, room.new)
            for group in inputs.groups:
                self._attend(room, group, held, group.masks[kind])
            self._finish(layer, room)
        return self._logits(room.x.index_select(0, read))

    def embed(self, ids_N: torch.Tensor, room: Scratch) -> None:
        """Write the input of the first layer."""
        if self._embedding.dtype == room.x.dtype:
            torch.index_select(self._embedding, 0, ids_N, out=room.x)
        else:
            room.x.copy_(self._embedding.index_select(0, ids_N))
        if (low := self._embedding_low) is not None:
            room.x.add_(low.down.t().index_select(0, ids_N) @ low.up.t())
        if self._embedding_scale is not None:
            room.x.mul_(self._embedding_scale)

    def _project(self, layer: FusedLayer, room: Scratch, turn: torch.Tensor) -> None:
        """Write a layer's queries, keys and values."""
        layer.qkv.linear(self._normed(room, layer.qkv), out=room.turning)
        if layer.head_norm is not None:
            normed = functional.rms_norm(room.turned, (self.size,), eps=self._eps)
            torch.mul(normed, layer.head_norm, out=room.turned)
        room.turned_complex.mul_(turn)
        if room.heads is not room.turning:
            room.heads.copy_(room.turning)

    def _finish(self, layer: FusedLayer, room: Scratch) -> None:
        """Compute the part of a layer after attention."""
        self._add(layer.out, room.mixed, layer.out_norm, room)
        layer.gate_up.linear(self._normed(room, layer.gate_up), out=room.gate_up)
        if self._is_gemma:
            torch.mul(functional.gelu(room.gate, approximate="tanh"), room.up, out=room.gate)
        else:
            functional.silu(room.gate, inplace=True).mul_(room.up)
        self._add(layer.down, room.gate, layer.down_norm, room)

    def _logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, V] of the last layer's states."""
        length = torch.linalg.vector_norm(x_BE, dim=-1, keepdim=True)
        normed = x_BE / length.hypot_(self._least)
        if self._head.scale is not None:
            normed = normed.mul_(self._head.scale).to(self.dtype)
        return self._head.linear(normed)

    def _turns_at(self, position_N: torch.Tensor, most: int) -> dict[str, torch.Tensor]:
        """Return the complex rotary embedding [N, 1, 1, D / 2] of positions below `most`, by layer kind."""
        half, position_1T = self.size // 2, torch.arange(most)[None]
        for kind, turns in self._turns.items():
            if len(turns) < most:
                own = (kind,) if isinstance(self._rotary.rope_type, dict) else ()
                cos, sin = self._rotary(torch.zeros(1), position_1T, *own)
                self._turns[kind] = torch.complex(cos[0, :, :half], sin[0, :, :half])
        return {kind: turns.index_select(0, position_N)[:, None, None] for kind, turns in self._turns.items()}

    def _attend(self, room: Scratch, group: RowGroup, held: SlotLayer, mask_B1TS: torch.Tensor) -> None:
        """Compute the attention of a group's rows."""
        (rows, width), own, (slot, shared) = group.shape, group.tokens, group.prefix
        keys, values = held.of(group.slots, group.span, shared)
        query, mixed = room.query[own], room.mixed_by_group[own]
        if shared:
            prefix = held.of(slice(slot, slot + 1), shared)
            mixed.copy_(_attend_with_prefix(query, prefix, (keys, values), mask_B1TS, self.scale))
            return
        if width == 1:
            _attend_singly(query, mixed, keys, values, mask_B1TS, self.scale)
            return
        query_NHD = query.flatten(1, 2)
        if group.padded is not None:
            query_NHD = query_NHD.index_select(0, group.padded[0])
        mixed_BHTD = functional.scaled_dot_product_attention(
            query_NHD.view(rows, width, -1, self.size).transpose(1, 2),
            keys,
            values,
            mask_B1TS,
            scale=self.scale,
            enable_gqa=self._grouped,
        )
        mixed_NHD = mixed_BHTD.transpose(1, 2).flatten(0, 1)
        if group.padded is not None:
            mixed_NHD = mixed_NHD.index_select(0, group.padded[1])
        mixed.copy_(mixed_NHD.view(mixed.shape))

    def _normed(self, room: Scratch, after: AfterNorm) -> torch.Tensor:
        """Return RMSNorm of the states; factors that are folded into the layer `after` are left out."""
        torch.linalg.vector_norm(room.x, dim=-1, keepdim=True, out=room.length)
        torch.div(room.x, room.length.hypot_(self._least), out=room.scaled)
        if after.scale is None:
            return room.scaled
        return torch.mul(room.scaled, after.scale, out=room.normed)

    def _add(self, linear: PackedLinear, x: torch.Tensor, norm: torch.Tensor | None, room: Scratch) -> None:
        """Add a linear layer's result to the states, normed first if `norm` is given."""
        if norm is None:
            linear.add_to(room.x, x)
            return
        y = linear(x, out=room.scaled)
        torch.linalg.vector_norm(y, dim=-1, keepdim=True, out=room.length)
        room.x.addcmul_(y.div_(room.length.hypot_(self._least)), norm)

    def _allocated(self, tokens: int) -> list[torch.Tensor]:
        wide = [torch.empty(tokens, width) for width in self._widths]
        narrow = [torch.empty(tokens, width, dtype=self.dtype) for width in self._narrow_widths]
        if self.dtype == torch.float32:
            narrow[:2] = wide[2:]
        return wide + narrow


def _attend_singly(
    query_BGRD: torch.Tensor,
    mixed_BGRD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask_B11S: torch.Tensor,
    scale: float,
) -> None:
    """Write attention of single tokens to keys and values [B, G, S, D].

    In float32, two plain products take half as long as the CPU's flash kernel. In bfloat16 they take longer.
    """
    if keys.dtype != torch.float32:
        mixed_BGRD.copy_(_flash_attention(query_BGRD, keys, values, mask_B11S, scale)[0])
        return
    mask_M1S = mask_B11S.expand(-1, query_BGRD.shape[1], -1, -1).flatten(0, 1)
    keys_MDS = keys.flatten(0, 1).transpose(1, 2)
    scores_MRS = torch.baddbmm(mask_M1S, query_BGRD.flatten(0, 1), keys_MDS, alpha=scale)
    torch.bmm(scores_MRS.softmax(dim=-1), values.flatten(0, 1), out=mixed_BGRD.flatten(0, 1))


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

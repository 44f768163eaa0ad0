"""Llama's and Gemma's forward pass with a quarter of the operations, for float32 and bfloat16 on a CPU.

A step of a small model takes as many microseconds as it has operations. Here, one matrix product computes all
projections of an input, and queries and keys turn as complex numbers. A layer's keys and values are stored in
one go, and attention of single tokens is two plain products. Results go into existing memory, through
existing views. Weights are copied.

In bfloat16, the states between layers, norms and rotary embeddings are in float32, as in the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from etude.inference.fused_weights import AfterNorm, FusedLayer, PackedLinear, fused_layer, is_gemma, low_rank
from etude.inference.kv_slots import KvSlots, RaggedInputs, RowGroup, SlotLayer
from etude.models.architecture import layer_kinds, without_lora


class Scratch:
    """The workspace of a forward pass of N tokens: memory that it writes to, and views into it."""

    def __init__(self, memory: Sequence[torch.Tensor], groups: int, size: int) -> None:
        """`memory` is as `FusedLlama` allocates it. `groups` of heads share keys; `size` is a head's D."""
        self._made_of = memory, groups, size
        self.x, self.length, self.scaled, self.turning = memory[:4]
        """In float32: [N, E], [N, 1], [N, E] and [N, G * (R + 2) * D] in the order of `FusedLayer.qkv`."""
        self.normed, self.heads, self.mixed, self.gate_up = memory[4:]
        """In the dtype of the weights: [N, E], [N, G * (R + 2) * D], [N, G * R * D] and [N, 2 * I]. In
        float32 the first two are `scaled` and `turning`."""
        by_group = self.heads.view(len(self.x), groups, -1, size)
        as_batch = by_group.flatten(0, 1)
        self.query, self.new = as_batch[:, :-2], as_batch[:, -2:]
        """Queries [N * G, R, D]; keys and values [N * G, 2, D]."""
        self.turned = self.turning.view(by_group.shape)[:, :, :-1]
        """Queries and keys [N, G, R + 1, D]."""
        self.turned_complex = torch.view_as_complex(self.turned.view(*self.turned.shape[:-1], -1, 2))
        """The same as complex numbers [N, G, R + 1, D / 2]."""
        self.mixed_by_group = self.mixed.view(self.query.shape)
        self.gate, self.up = self.gate_up.chunk(2, dim=1)

    def first(self, tokens: int) -> Scratch:
        """Return the room of the first `tokens` tokens."""
        memory, groups, size = self._made_of
        return Scratch([each[:tokens] for each in memory], groups, size)


Apart: TypeAlias = Callable[[Scratch], Callable[[SlotLayer], None]]
"""Attention of a pass's first tokens, which are in no group: for a room, a function of a layer's slots."""


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
        self._memory = self._allocated(0)
        self._rooms: dict[int, Scratch] = {}

    def __call__(
        self, inputs: RaggedInputs, kv: KvSlots, read: torch.Tensor, apart: Apart | None = None
    ) -> torch.Tensor:
        """Return the logits [B, V] after the tokens at the places `read`."""
        tokens = len(inputs.ids_N)
        self.reach(kv.columns)
        is_few = tokens <= 128  # Memory for more tokens is not kept.
        room = self.workspace(tokens) if is_few else Scratch(self._allocated(tokens), self.groups, self.size)
        turns = self.turns(inputs.position_N)
        places = kv.places(self.groups, inputs.slot_N, inputs.column_N)
        attend_apart = None if apart is None else apart(room)
        self.embed(inputs.ids_N, room)
        for kind, layer, held in zip(self.kinds, self.layers, kv.layers, strict=True):
            self.project(layer, room, turns[kind])
            held.by_token(self.groups, self.size, self.dtype).index_copy_(0, places, room.new)
            if attend_apart is not None:
                attend_apart(held)
            for group in inputs.groups:
                self._attend(room, group, held, group.masks[kind])
            self.finish(layer, room)
        return self.logits(room.x.index_select(0, read))

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

    def project(self, layer: FusedLayer, room: Scratch, turn: torch.Tensor) -> None:
        """Write a layer's queries, keys and values."""
        layer.qkv.linear(self._normed(room, layer.qkv), out=room.turning)
        if layer.head_norm is not None:
            normed = functional.rms_norm(room.turned, (self.size,), eps=self._eps)
            torch.mul(normed, layer.head_norm, out=room.turned)
        room.turned_complex.mul_(turn)
        if room.heads is not room.turning:
            room.heads.copy_(room.turning)

    def finish(self, layer: FusedLayer, room: Scratch) -> None:
        """Compute the part of a layer after attention."""
        self._add(layer.out, room.mixed, layer.out_norm, room)
        layer.gate_up.linear(self._normed(room, layer.gate_up), out=room.gate_up)
        if self._is_gemma:
            torch.mul(functional.gelu(room.gate, approximate="tanh"), room.up, out=room.gate)
        else:
            functional.silu(room.gate, inplace=True).mul_(room.up)
        self._add(layer.down, room.gate, layer.down_norm, room)

    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, V] of the last layer's states."""
        length = torch.linalg.vector_norm(x_BE, dim=-1, keepdim=True)
        normed = x_BE / length.hypot_(self._least)
        if self._head.scale is not None:
            normed = normed.mul_(self._head.scale).to(self.dtype)
        return self._head.linear(normed)

    def turns(self, position_N: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the complex rotary embedding of positions, [N, 1, 1, D / 2], by kind of layer."""
        return {kind: turns.index_select(0, position_N)[:, None, None] for kind, turns in self._turns.items()}

    def reach(self, positions: int) -> None:
        """Prepare the rotary embeddings of this many positions."""
        half, position_1T = self.size // 2, torch.arange(positions)[None]
        for kind, turns in self._turns.items():
            if len(turns) < positions:
                own = (kind,) if isinstance(self._rotary.rope_type, dict) else ()
                cos, sin = self._rotary(torch.zeros(1), position_1T, *own)
                self._turns[kind] = torch.complex(cos[0, :, :half], sin[0, :, :half])

    def workspace(self, tokens: int) -> Scratch:
        """Return a reusable room for a few tokens; all such rooms share their memory."""
        if tokens > len(self._memory[0]):
            self._memory = self._allocated(2 * tokens)
            self._rooms.clear()
        if tokens not in self._rooms:
            memory = {id(tensor): tensor[:tokens] for tensor in self._memory}
            self._rooms[tokens] = Scratch([memory[id(each)] for each in self._memory], self.groups, self.size)
        return self._rooms[tokens]

    def _attend(self, room: Scratch, group: RowGroup, held: SlotLayer, mask_B1TS: torch.Tensor) -> None:
        """Compute the attention of a group's rows."""
        (rows, width), own = group.shape, group.tokens
        keys, values = held.of(group.slots, group.span)
        if width == 1:
            all_of = slice(own.start * self.groups, own.stop * self.groups)
            mask_BG1S = mask_B1TS.expand(rows, self.groups, 1, -1)
            query, mixed = room.query[all_of], room.mixed_by_group[all_of]
            attend(query, mixed, *as_batch(keys, values), mask_BG1S, self.scale)
            return
        query_NGRD = room.query.view(len(room.x), self.groups, -1, self.size)[own]
        query_NHD = (
            query_NGRD.flatten(1, 2)
            if group.padded is None
            else query_NGRD.flatten(1, 2).index_select(0, group.padded[0])
        )
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
        room.mixed[own].view(mixed_NHD.shape).copy_(mixed_NHD)

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


def as_batch(keys_BGSD: torch.Tensor, values_BGSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in the layout that `attend` takes."""
    if keys_BGSD.dtype != torch.float32:
        return keys_BGSD, values_BGSD
    return keys_BGSD.flatten(0, 1).transpose(1, 2), values_BGSD.flatten(0, 1)


def attend(
    query_MRD: torch.Tensor,
    mixed_MRD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask_BG1S: torch.Tensor,
    scale: float,
) -> None:
    """Write attention of single tokens to `mixed_MRD`, for each row and group of heads.

    In float32, two plain products take half as long as the CPU's flash kernel. In bfloat16 they take longer.
    """
    if keys.dtype == torch.float32:
        scores_MRS = torch.baddbmm(mask_BG1S.flatten(0, 1), query_MRD, keys, alpha=scale)
        torch.bmm(torch.softmax(scores_MRS, dim=-1), values, out=mixed_MRD)
        return
    mixed_BGRD, _ = flash_attention(query_MRD, keys, values, mask_BG1S, scale)
    mixed_MRD.view(mixed_BGRD.shape).copy_(mixed_BGRD)


def flash_attention(
    query_MRD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask_BG1S: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of single tokens [B, G, R, D] in bfloat16, and their scores' log-sum-exp [B, G, R] in
    float32."""
    heads, size = query_MRD.shape[1:]
    query_BGRD = query_MRD.view(*mask_BG1S.shape[:2], heads, size)
    if heads == 1:  # The kernel takes half as long for two queries as for one.
        query_BGRD = query_BGRD.expand(-1, -1, 2, -1)
    mask_BGRS = mask_BG1S.expand(-1, -1, query_BGRD.shape[2], -1)
    mixed_BGRD, score_BGR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query_BGRD, keys, values, attn_mask=mask_BGRS, scale=scale
    )
    return mixed_BGRD[:, :, :heads], score_BGR[:, :, :heads]

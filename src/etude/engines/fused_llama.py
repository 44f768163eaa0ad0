"""Llama's and Gemma's forward pass with a quarter of the operations, for a CPU, and for bfloat16 on CUDA.

A step of a small model takes as many microseconds as it has operations. Here, one matrix product computes all
projections of an input, and queries and keys turn as complex numbers. A layer's keys and values are stored in
one go, and attention of single tokens is two plain products. A prefix that rows share is read once for all of
them. Weights are copied: joined if they share an input, folded where that is exact.

In float32, a norm's weight becomes a part of the matrix after it, and LoRA weights are merged. In bfloat16
they stay separate: another rounding would lose everything below a 500th of a weight. The states between
layers, norms and rotary embeddings are in float32 there, as in the learner. On a CPU keys and values are in
float32 too: products of single tokens are not faster in bfloat16, and need no rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from etude.engines.kv_slots import KvSlots, SlotLayer
from etude.engines.step_inputs import RaggedInputs, RowGroup, Spans
from etude.models.architecture import SLIDING, layer_kinds, text_config, without_lora

_LLAMAS = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
_GEMMAS = "GemmaForCausalLM", "Gemma3ForCausalLM"
"""Models that scale their embeddings, and multiply by a norm's weight plus one."""
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not depend on the length."""

_LEAST = 2**17
"""Elements of a weight below which oneDNN costs more than it saves."""

InOrder: TypeAlias = Callable[[list[torch.Tensor]], torch.Tensor]
"""Joins rows [out, ...] of several layers."""


class PackedLinear:
    """A linear layer, `x @ weight.T + bias`, with its LoRA weights if they are not merged."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> None:
        """`weight` [out, in], `bias` [out] and LoRA's `down` [r, in] and `up` [out, r] have one dtype."""
        self._bias, self._down, self._up, self._dtype = bias, down, up, weight.dtype
        # This CPU's oneDNN may lack the instructions for bfloat16.
        packs = torch.backends.mkldnn.is_available() and (  # type: ignore[no-untyped-call]
            weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        self._is_packed = weight.device.type == "cpu" and weight.numel() >= _LEAST and bool(packs)
        self._weight = weight.detach().t()
        if self._is_packed:  # Keep only the packed copy: the other one would take as much memory again.
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, in] to [N, out] in float32, in which LoRA weights' small numbers keep their precision."""
        x, weight = x.to(self._dtype), self._weight
        if self._is_packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, self._bias, "none", [], "")
        else:
            y = torch.mm(x, weight) if self._bias is None else torch.addmm(self._bias, x, weight)
        y = y.float()
        return y if self._down is None or self._up is None else y.add_(x @ self._down.t() @ self._up.t())


class AfterNorm:
    """RMSNorm and the linear layer after it, for vectors that were already divided by their length."""

    def __init__(self, norm: Any, modules: Sequence[Any], in_order: InOrder = torch.cat) -> None:
        """`modules` are linear layers with the same input, as for `linear`."""
        scale = norm_scale(norm) * len(norm.weight) ** 0.5
        is_folded = norm.weight.dtype == torch.float32
        self.scale = None if is_folded else scale
        """Factors [E] of the vectors' elements; None if they are folded into the linear layer."""
        self.linear = linear(modules, in_order, scale if is_folded else None)


@dataclass(frozen=True)
class FusedLayer:
    """Weights of a layer, with the two numbers of each rotation side by side."""

    qkv: AfterNorm
    """For each group of heads with common keys: R queries, a key and a value, [G * (R + 2) * D, E]."""
    head_norm: torch.Tensor | None
    """Norm factors of a group's queries and key, [R + 1, D] in float32."""
    out: PackedLinear
    out_norm: torch.Tensor | None
    """Norm factors [E] in float32 of the result of `out`, if it is normed before it is added."""
    gate_up: AfterNorm
    down: PackedLinear
    down_norm: torch.Tensor | None


def can_fuse(model: Any) -> bool:
    """Return whether FusedLlama supports the whole model: on a CPU, or on CUDA in bfloat16."""
    devices = {value.device.type for value in model.parameters()}
    if devices not in ({"cpu"}, {"cuda"}):
        return False
    config = without_lora(model).config
    if devices == {"cuda"}:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # CUDA's flash kernels take some widths of heads.
        if model.dtype != torch.bfloat16 or size % 8 or size > 256:
            return False
    if is_gemma(model):
        caps = "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"
        activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        knows_rest = activation == "gelu_pytorch_tanh" and not any(getattr(config, cap, None) for cap in caps)
        return _is_plain(model, _GEMMAS) and knows_rest
    return is_llama(model)


def is_llama(model: Any) -> bool:
    """Return whether it is a Llama or a close relative, in float32 or bfloat16, without modifications."""
    return _is_plain(model, _LLAMAS) and without_lora(model).config.hidden_act == "silu"


def is_gemma(model: Any) -> bool:
    """Return whether it scales its embeddings, and multiplies by a norm's weight plus one."""
    return type(without_lora(model)).__name__ in _GEMMAS


def _is_plain(model: Any, classes: Sequence[str]) -> bool:
    """Return whether it has one of these classes of `transformers`, and nothing in it was replaced."""
    inner = without_lora(model)
    known = type(inner).__name__ in classes and type(inner).__module__.startswith("transformers.models.")
    if not known or "forward" in vars(inner) or "forward" in vars(model):
        return False  # A replaced forward pass must be called.
    dtypes = {
        value.dtype
        for name, module in inner.named_modules()
        if ".lora_" not in name
        for value in module.parameters(recurse=False)
    }
    body = inner.model
    ropes = body.rotary_emb.rope_type
    ropes = {ropes} if isinstance(ropes, str) else {*ropes.values()}
    return (
        dtypes in ({torch.float32}, {torch.bfloat16})
        and ropes <= {*_FIXED_ROPE}
        and isinstance(body.embed_tokens, nn.Embedding)
        and isinstance(inner.lm_head, nn.Linear)
        and all(_is_affine(module) for name, module in body.layers.named_modules() if name.endswith("_proj"))
    )


def norm_scale(norm: Any) -> torch.Tensor:
    """Return the factors [E] of a norm in float32."""
    scale: torch.Tensor = norm.weight.detach().float()
    return scale + 1 if type(norm).__name__.startswith("Gemma") else scale


def fused_layer(layer: Any, config: Any) -> FusedLayer:
    """Return the weights of a decoder layer."""
    attention, mlp = layer.self_attn, layer.mlp
    size, groups = attention.head_dim, config.num_key_value_heads
    queries = config.num_attention_heads // groups
    head_norm = None
    if hasattr(attention, "q_norm"):
        norms = [norm_scale(attention.q_norm)] * queries + [norm_scale(attention.k_norm)]
        head_norm = _pair_rotations(torch.cat(norms), size).view(-1, size)
    qkv, in_order = [attention.q_proj, attention.k_proj, attention.v_proj], partial(_by_group, groups, size)
    before_mlp, out_norm, down_norm = layer.post_attention_layernorm, None, None
    if hasattr(layer, "pre_feedforward_layernorm"):
        before_mlp, root = layer.pre_feedforward_layernorm, config.hidden_size**0.5
        out_norm = norm_scale(layer.post_attention_layernorm) * root
        down_norm = norm_scale(layer.post_feedforward_layernorm) * root
    return FusedLayer(
        qkv=AfterNorm(layer.input_layernorm, qkv, in_order),
        head_norm=head_norm,
        out=linear([attention.o_proj]),
        out_norm=out_norm,
        gate_up=AfterNorm(before_mlp, [mlp.gate_proj, mlp.up_proj]),
        down=linear([mlp.down_proj]),
        down_norm=down_norm,
    )


def linear(
    modules: Sequence[Any], in_order: InOrder = torch.cat, scale: torch.Tensor | None = None
) -> PackedLinear:
    """Join linear layers with the same input into one, with their LoRA weights.

    In float32, LoRA weights are merged. `scale` has factors [in] of the input, for merged layers only.
    """
    bases = [getattr(module, "base_layer", module) for module in modules]
    weights, down, up = [base.weight.detach() for base in bases], None, None
    lows = [
        (
            module.lora_A["default"].weight.detach(),
            module.lora_B["default"].weight.detach() * module.scaling["default"],
        )
        if hasattr(module, "get_delta_weight")
        else (weight.new_zeros(0, weight.shape[1]), weight.new_zeros(len(weight), 0))
        for module, weight in zip(modules, weights, strict=True)
    ]
    if weights[0].dtype == torch.float32:
        pairs = zip(weights, lows, strict=True)
        weights = [torch.addmm(weight, b, a) if len(a) else weight for weight, (a, b) in pairs]
    elif any(len(down) for down, _ in lows):
        # Each layer adds to its own rows.
        joined: torch.Tensor = torch.block_diag(*(up for _, up in lows))  # type: ignore[no-untyped-call]
        ups = torch.split(joined.to(weights[0].dtype), [*map(len, weights)])
        down, up = torch.cat([down for down, _ in lows]).to(weights[0].dtype), in_order([*ups])
    biases = [base.bias.detach() for base in bases if base.bias is not None]
    # Large copies take longer than what is done with them, so there is none without need.
    weight, is_own = weights[0], len(weights) == 1 and weights[0].data_ptr() == bases[0].weight.data_ptr()
    if len(weights) > 1:
        weight = in_order(weights)
    if scale is not None:
        weight = weight * scale if is_own else weight.mul_(scale)
    return PackedLinear(weight, in_order(biases) if biases else None, down, up)


def _by_group(groups: int, size: int, qkv: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return rows of queries, keys and values [n * D, ...] in the order of `FusedLayer.qkv`."""
    query, key, value = qkv
    parts = [_pair_rotations(query, size), _pair_rotations(key, size), value]
    return torch.cat([part.view(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def _pair_rotations(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows of heads [n * D, ...], reordered so that the two of each rotation are side by side."""
    halves = rows.view(-1, 2, size // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _is_affine(module: Any) -> bool:
    if hasattr(module, "get_delta_weight"):
        return type(module.base_layer) is nn.Linear and not module.lora_variant
    return type(module) is nn.Linear


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
        weight = body.embed_tokens.weight
        self.kv_dtype: torch.dtype = weight.dtype if weight.is_cuda else torch.float32
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
        """Take a model's weights anew into the same memory. Its embedding must be where it was."""
        inner = without_lora(model)
        for mine, layer in zip(self.layers, inner.model.layers, strict=True):
            _copy_tensors(fused_layer(layer, inner.config), mine)
        _copy_tensors(AfterNorm(inner.model.norm, [inner.lm_head]), self._head)

    def __call__(self, inputs: RaggedInputs, kv: KvSlots, read: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, V] after the tokens at the places `read`."""
        ids_N, position_N = inputs.ids_N, inputs.position_N
        if inputs.repeats is not None:
            different_D, equal_N = inputs.repeats
            ids_N, position_N = (each.index_select(0, different_D) for each in (ids_N, position_N))
            read, place_B = torch.unique(equal_N.index_select(0, read), return_inverse=True)
        turns = self._turns_at(position_N, kv.columns)
        places = kv.places(self.groups, inputs.slot_N, inputs.column_N)
        counts = [group.count for group in inputs.groups]
        x_NE: torch.Tensor = self._embedding.index_select(0, ids_N).float()
        if self._embedding_scale is not None:
            x_NE.mul_(self._embedding_scale)
        for kind, layer, held in zip(self.kinds, self.layers, kv.layers, strict=True):
            heads = self._heads(layer, x_NE, turns[kind])
            if inputs.repeats is not None:
                heads = heads.index_select(0, equal_N)
            query_NGRD, new = heads.tensor_split((-2,), dim=2)
            held.by_token(self.groups, self.size, self.kv_dtype).index_copy_(0, places, new.flatten(0, 1))
            if inputs.spans is not None:
                window = self._window if kind == SLIDING else None
                mixed = [self._attend_spans(query_NGRD.flatten(1, 2), held, inputs.spans, self.scale, window)]
            else:
                parts = zip(query_NGRD.split_with_sizes(counts), inputs.groups, strict=True)
                mixed = [self._attend(query, group, held, group.masks[kind]) for query, group in parts]
            mixed_NM = torch.cat(mixed).flatten(1)
            if inputs.repeats is not None:
                mixed_NM = mixed_NM.index_select(0, different_D)
            x_NE = self._add(x_NE, layer.out(mixed_NM), layer.out_norm)
            gate, up = layer.gate_up.linear(self._norm(x_NE, layer.gate_up)).chunk(2, dim=1)
            gate = (
                functional.gelu(gate, approximate="tanh") if self._is_gemma else functional.silu(gate, True)
            )
            x_NE = self._add(x_NE, layer.down(gate.mul_(up)), layer.down_norm)
        logits_BV = self._head.linear(self._norm(x_NE.index_select(0, read), self._head))
        return logits_BV if inputs.repeats is None else logits_BV.index_select(0, place_B)

    def _heads(self, layer: FusedLayer, x_NE: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """Return a layer's queries, keys and values [N, G, R + 2, D]."""
        heads = layer.qkv.linear(self._norm(x_NE, layer.qkv)).view(len(x_NE), self.groups, -1, self.size)
        turned = heads[:, :, :-1]
        if layer.head_norm is not None:
            torch.mul(functional.rms_norm(turned, (self.size,), eps=self._eps), layer.head_norm, out=turned)
        torch.view_as_complex(turned.view(*turned.shape[:-1], -1, 2)).mul_(turn)
        return heads.to(self.kv_dtype)

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
        keys, values = held.columns(group.slots, group.span, shared)
        if width == 1:
            prefix = (held.keys[slot, :, :shared], held.values[slot, :, :shared]) if shared else None
            return _attend_once(query, prefix, (keys, values), mask, self.scale)
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
    elif isinstance(part, FusedLayer | AfterNorm | PackedLinear):
        for value in vars(part).values():
            yield from _tensors(value)


def _attend_once(
    query_BGRD: torch.Tensor,
    prefix: tuple[torch.Tensor, torch.Tensor] | None,
    own: tuple[torch.Tensor, torch.Tensor],
    mask_M1S: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return the attention [B, G, R, D] of single tokens to their `own` keys and values [B, G, S, D], and to
    those [G, L, D] of a prefix that all rows share. All queries read the prefix together."""
    rows, groups, repeats, _ = query_BGRD.shape
    keys_MSD, values_MSD = (each.flatten(0, 1) for each in own)
    scores_MRS = torch.baddbmm(mask_M1S, query_BGRD.flatten(0, 1), keys_MSD.transpose(1, 2), alpha=scale)
    if prefix is None:
        return torch.bmm(scores_MRS.softmax(dim=-1), values_MSD).view(query_BGRD.shape)
    keys_GLD, values_GLD = prefix
    shared_GTL = torch.bmm(query_BGRD.transpose(0, 1).flatten(1, 2), keys_GLD.transpose(1, 2)).mul_(scale)
    shared_BGRL = shared_GTL.view(groups, rows, repeats, -1).transpose(0, 1)
    scores_BGRS = scores_MRS.view(rows, groups, repeats, -1)
    weights = torch.cat([shared_BGRL, scores_BGRS], dim=-1).softmax(dim=-1)
    shared_BGRL, weights_BGRS = weights.tensor_split((len(keys_GLD[0]),), dim=-1)
    mixed_GTD = torch.bmm(shared_BGRL.transpose(0, 1).flatten(1, 2), values_GLD)
    mixed_BGRD = torch.bmm(weights_BGRS.flatten(0, 1), values_MSD).view(query_BGRD.shape)
    return mixed_BGRD.add_(mixed_GTD.view(groups, rows, repeats, -1).transpose(0, 1))

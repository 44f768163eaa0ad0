"""The architectures of transformers that are tried, tiny: for tests, and for docs/models.md.

`python -m tests.models.architectures` writes that page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from etude.config.finetuning import LoraOptions
from etude.engines.decoder import SlotDecoder
from etude.engines.embedded import make_decoder
from etude.learner.passes import tree_refusal
from etude.models.architecture import layer_kinds, model_class
from etude.models.policy import Policy
from tests.models.tiny_models import family, loud, tiny_sizes, tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

HEAD: dict[str, Any] = {"head_dim": 8}
WINDOW: dict[str, Any] = {"sliding_window": 6}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
SHARED: dict[str, Any] = EXPERTS | {"shared_expert_intermediate_size": 16}
LATENT: dict[str, Any] = EXPERTS | {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
LINEAR: dict[str, Any] = HEAD | {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
STATE: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_d_ssm": 64,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "head_dim": 8,
}


@dataclass(frozen=True)
class Architecture:
    """A family: its name, the class of its config, and what makes a tiny one of it."""

    name: str
    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] | None = None
    """Of a model that sees; the other changes are of its text config then."""

    @property
    def usual(self) -> bool:
        """Whether it is tried in every run of the tests; others are in the slow ones."""
        return self.config.removesuffix("Config") in USUAL

    @property
    def tolerance(self) -> float:
        """Of gradients; layers with a state add up long products, which round more."""
        return 1e-4 if "linear_num_key_heads" in self.changes else 1e-5

    def build(self) -> Policy:
        """A tiny policy with random weights."""
        if self.vision is None:
            return family(self.config, **self.changes)
        text = tiny_sizes() | self.changes
        config = getattr(transformers, self.config)(text_config=text, vision_config=self.vision)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = model_class(config).from_config(config)
        return loud(Policy(model, tokenizer(), self.config, torch.device("cpu")))


ARCHITECTURES = [
    Architecture("Llama 3", "LlamaConfig"),
    Architecture("Qwen 2, 2.5", "Qwen2Config"),
    Architecture("Qwen 3", "Qwen3Config", HEAD),
    Architecture("SmolLM 3", "SmolLM3Config"),
    Architecture("Phi 3, 4", "Phi3Config"),
    Architecture("OLMo 2", "Olmo2Config"),
    Architecture("Cohere Command R", "CohereConfig"),
    Architecture("GLM 4", "Glm4Config", HEAD),
    Architecture("Granite 3", "GraniteConfig"),
    Architecture("Seed-OSS", "SeedOssConfig", HEAD),
    Architecture("Nemotron 4, Minitron", "NemotronConfig"),
    Architecture("Mistral 7B", "MistralConfig", HEAD | WINDOW),
    Architecture("Ministral 3", "Ministral3Config", HEAD),
    Architecture("Cohere Command R7B, A", "Cohere2Config", WINDOW),
    Architecture("OLMo 3", "Olmo3Config", WINDOW),
    Architecture("EXAONE 4", "Exaone4Config", WINDOW),
    Architecture("Gemma 2", "Gemma2Config", HEAD | WINDOW),
    Architecture("Gemma 3 (text)", "Gemma3TextConfig", HEAD | WINDOW | {"sliding_window_pattern": 2}),
    Architecture(
        "Gemma 3n (text)",
        "Gemma3nTextConfig",
        HEAD
        | WINDOW
        | {
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 330,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
            "activation_sparsity_pattern": [0.0] * 5,
            "intermediate_size": [48] * 5,
        },
    ),
    Architecture(
        "Gemma 4 (text)",
        "Gemma4TextConfig",
        HEAD
        | WINDOW
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 330,
        },
    ),
    Architecture("Mixtral", "MixtralConfig", EXPERTS),
    Architecture("Qwen 2 MoE", "Qwen2MoeConfig", SHARED),
    Architecture("Qwen 3 MoE", "Qwen3MoeConfig", EXPERTS | HEAD),
    Architecture("gpt-oss", "GptOssConfig", EXPERTS | HEAD | WINDOW),
    Architecture(
        "GLM 4.5 to 4.7",
        "Glm4MoeConfig",
        EXPERTS | HEAD | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    Architecture("MiniMax M2", "MiniMaxM2Config", EXPERTS | HEAD),
    Architecture("OLMoE", "OlmoeConfig", EXPERTS),
    Architecture("Phi 3.5 MoE", "PhimoeConfig", EXPERTS),
    Architecture("Granite 3 MoE", "GraniteMoeConfig", EXPERTS),
    Architecture("DeepSeek V2", "DeepseekV2Config", LATENT),
    Architecture("DeepSeek V3, R1", "DeepseekV3Config", LATENT),
    Architecture(
        "Llama 4 (text)",
        "Llama4TextConfig",
        EXPERTS | HEAD | {"intermediate_size_mlp": 48, "attention_chunk_size": 8, "num_hidden_layers": 4},
    ),
    Architecture("Qwen 3 Next", "Qwen3NextConfig", SHARED | LINEAR),
    Architecture("Qwen 3.5, 3.6", "Qwen3_5TextConfig", LINEAR),
    Architecture("Qwen 3.5 MoE", "Qwen3_5MoeTextConfig", SHARED | LINEAR),
    Architecture("LFM 2", "Lfm2Config", {"full_attn_idxs": [1]}),
    Architecture(
        "LFM 2 MoE",
        "Lfm2MoeConfig",
        EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    Architecture(
        "Nemotron-H, Nemotron 3",
        "NemotronHConfig",
        HEAD
        | {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    Architecture(
        "Jamba",
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "num_experts": 2,
            "mamba_d_state": 4,
        },
    ),
    Architecture("Bamba", "BambaConfig", STATE | {"attn_layer_indices": [1]}),
    Architecture(
        "Granite 4",
        "GraniteMoeHybridConfig",
        EXPERTS | STATE | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    ),
    Architecture("Falcon-H1", "FalconH1Config", HEAD | STATE),
    Architecture("Mamba", "MambaConfig", {"state_size": 4}),
    Architecture("GPT-2", "GPT2Config", {"n_head": 4}),
    Architecture("Gemma 3 (sees)", "Gemma3Config", HEAD | WINDOW, VISION),
    Architecture(
        "Qwen 3 VL",
        "Qwen3VLConfig",
        HEAD,
        {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        },
    ),
    Architecture("Mistral Small 3.1, 3.2 (sees)", "Mistral3Config", HEAD | {"model_type": "mistral"}, VISION),
]

USUAL = {"Gemma4Text", "GptOss", "Qwen3_5Text", "Lfm2"}

REFUSED = {"BertConfig": "looks ahead", "T5Config": "token by token", "XLNetConfig": "looks ahead"}
"""Families that are refused when they are loaded, and why."""


def row(of: Architecture) -> str:
    """The architecture's line of the table, from what the library says of it."""
    policy = of.build()
    kinds = ", ".join(kind.replace("_attention", "") for kind in dict.fromkeys(layer_kinds(policy.model)))
    in_slots = isinstance(make_decoder(policy, slots=1, deterministic=False), SlotDecoder)
    training = "trees" if tree_refusal(policy.model) is None else "padded"
    policy.use_lora(LoraOptions(r=2, alpha=4), 1)
    names = sorted(
        {name.split(".lora_")[0].rpartition(".")[2] for name in policy.trainable()} - {"base_layer"}
    )
    layers = ", ".join(f"`{name}`" for name in names)
    kind = of.config.removesuffix("Config")
    return f"| {of.name} | {kind} | {kinds} | {'slots' if in_slots else 'anew'} | {training} | {layers} |"


def page() -> str:
    """The page of the docs, with its table made anew."""
    head, rule, rest = PAGE.read_text(encoding="utf-8").partition("|---|---|---|---|---|---|\n")
    return head + rule + "\n".join(map(row, ARCHITECTURES)) + "\n\n" + rest.partition("\n\n")[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

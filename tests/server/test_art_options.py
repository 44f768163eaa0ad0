"""ART's options: what a job is told, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from etude.integrations.art.serving.options import (
    DevConfig,
    InternalConfig,
    ServerConfig,
    TrainConfig,
    hyperparameters,
)


def told(
    config: dict[str, Any] | None = None, dev: dict[str, Any] | None = None, **internal: Any
) -> dict[str, Any]:
    """The hyperparameters that differ from those of a request without options."""

    def made(*parts: Any) -> dict[str, Any]:
        registered, asked, more = parts
        return hyperparameters(
            InternalConfig.model_validate(registered),
            TrainConfig.model_validate(asked),
            DevConfig.model_validate(more),
        ).model_dump(exclude_none=True)

    plain = made({}, {}, {})
    found = made(internal, config or {}, dev or {})
    return {key: value for key, value in found.items() if plain.get(key) != value}


def test_a_request_without_options() -> None:
    found = hyperparameters(None, TrainConfig(), DevConfig()).model_dump(exclude_none=True)
    assert found == {"learning_rate": 5e-6, "reference": "base", "aggregation": "sequence", "ratio": "token"}


@pytest.mark.parametrize(
    ("config", "dev", "found"),
    [
        ({"learning_rate": 1e-4, "beta": 0.1}, {}, {"learning_rate": 1e-4, "beta": 0.1}),
        ({"kl_penalty_coef": 0.1}, {}, {"beta": 0.1}),
        ({"beta": 0.1, "kl_penalty_coef": 0.1}, {"kl_penalty_coef": 0.1}, {"beta": 0.1}),
        ({}, {"epsilon": 0.3}, {"clip_low": 0.3, "clip_high": 0.3}),
        ({}, {"epsilon": 0.3, "epsilon_high": 0.5}, {"clip_low": 0.3, "clip_high": 0.5}),
        ({}, {"epsilon_high": 0.5}, {"clip_high": 0.5}),
        ({}, {"ppo": True}, {"clip_low": 0.2, "clip_high": 0.2}),
        ({}, {"ppo": False}, {"surrogate": "cispo", "clip_high": 4.0}),
        ({}, {"ppo": False, "epsilon": 1.0, "epsilon_high": 2}, {"surrogate": "cispo", "clip_high": 2.0}),
        ({}, {"importance_sampling_level": "sequence"}, {"ratio": "sequence"}),
        ({}, {"scale_rewards": False}, {"advantage_scale": "none"}),
        ({}, {"mask_prob_ratio": False, "kimi_k2_tau": None, "precalculate_logprobs": False}, {}),
    ],
)
def test_options_of_a_request(config: dict[str, Any], dev: dict[str, Any], found: dict[str, Any]) -> None:
    assert told(config, dev) == found


@pytest.mark.parametrize("default", [5e-6, 5e-5])
def test_what_was_registered_holds_where_a_request_has_only_its_clients_defaults(default: float) -> None:
    trainer = {"learning_rate": 1e-3, "beta": 0.2}
    assert told({"learning_rate": default}, trainer_args=trainer) == trainer
    asked = {"learning_rate": 1e-4, "beta": 0.1}
    assert told(asked, trainer_args=trainer) == asked


@pytest.mark.parametrize(
    ("internal", "found"),
    [
        ({"init_args": None, "engine_args": None, "trainer_args": None}, {}),
        ({"peft_args": {"r": 8, "lora_alpha": 16}}, {"lora_rank": 8, "lora_alpha": 16.0}),
        ({"init_args": {"full_finetuning": True}}, {"lora_rank": 0}),
        ({"init_args": {"gpu_memory_utilization": 0.8, "load_in_4bit": True}}, {}),
        ({"engine_args": {"enforce_eager": True}, "trainer_gpu_ids": [0]}, {}),
        ({"trainer_args": {"logging_steps": 1, "report_to": "wandb", "max_grad_norm": 1.0}}, {}),
    ],
)
def test_what_a_model_is_registered_with(internal: dict[str, Any], found: dict[str, Any]) -> None:
    assert told(**internal) == found


@pytest.mark.parametrize(
    ("dev", "name"),
    [
        ({"advantage_balance": 0.5}, "advantage_balance"),
        ({"truncated_importance_sampling": 2.0}, "truncated_importance_sampling"),
        ({"kl_ref_adapter_path": "x"}, "kl_ref_adapter_path"),
        ({"ppo": False, "epsilon": 0.5}, "epsilon"),
        ({"epsilon": 1.5}, "epsilon"),
        ({"ppoo": True}, "ppoo"),
    ],
)
def test_an_option_of_the_loss_that_is_not_there_is_refused(dev: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        DevConfig.model_validate(dev)


@pytest.mark.parametrize(
    ("internal", "name"),
    [
        ({"peft_args": {"lora_dropout": 0.1}}, "lora_dropout"),
        ({"peft_args": {"target_modules": ["q_proj"]}}, "target_modules"),
        ({"trainer_args": {"weight_decay": 0.1}}, "weight_decay: can only be 0.0 here"),
        ({"trainer_args": {"lr_scheduler_type": "cosine"}}, "lr_scheduler_type"),
        ({"engine_args": {"tokenizer": "other"}}, "engine_args.tokenizer"),
        ({"tinker_args": {"renderer_name": "x"}}, "tinker_args"),
    ],
)
def test_a_model_that_would_be_another_one_is_refused(internal: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        InternalConfig.model_validate(internal)


def test_how_inference_is_served_is_the_servers_affair_but_not_what_is_said_to_the_model() -> None:
    ServerConfig.model_validate({"log_file": "x", "server_args": {"port": 9000}, "engine_args": {}})
    with pytest.raises(ValidationError, match=r"server_args\.chat_template"):
        ServerConfig.model_validate({"server_args": {"chat_template": "x"}})


def test_two_weights_of_the_kl_are_refused() -> None:
    with pytest.raises(ValueError, match=r"they are 0\.1 and 0\.2"):
        told({"beta": 0.1}, {"kl_penalty_coef": 0.2})

"""ART's options of training: each is honoured, has no bearing here, or is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from etude.server.hyperparameters import Hyperparameters, Positive, hyperparameters_for

CLIENT_RATES = (5e-6, 5e-5)
"""The learning rates that ART's own client and the toolkit's send where nobody chose one."""

_CISPO_HIGH = 4.0
"""ART 0.5's `epsilon_high` without `ppo`."""
_PPO_EPSILON = 0.2

_LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""The modules that ART puts LoRA weights on, which are all linear layers, as here."""

_OTHER_MODEL = {
    "init_args": ("model_name", "revision", "rope_scaling", "resize_model_vocab"),
    "engine_args": ("model", "tokenizer", "revision", "tokenizer_revision", "rope_scaling", "hf_overrides"),
    "server_args": ("chat_template", "lora_modules", "prompt_adapters"),
}
"""Arguments that would make another model of it. All others say how it is put into memory and served,
which is the affair of `etude serve`."""

_REPORTS = ("logging_", "log_", "save_", "report_to", "run_name", "output_dir", "disable_tqdm", "eval_")
"""How the names of trainer arguments begin that have no bearing on the weights."""

_ALSO_SO = {"weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.95, "max_grad_norm": 1.0}
"""Trainer arguments that can be given, since they are so here."""


def _off(value: Any) -> Any:
    if value:
        raise ValueError("this server has no such option; leave it out")
    return value


def _linear(value: list[str] | None) -> list[str] | None:
    if value is not None and set(value) != _LINEAR:
        raise ValueError("LoRA weights are put on all linear layers here; leave it out")
    return value


Off: TypeAlias = Annotated[Any, AfterValidator(_off)]
"""Known, and can only be left out or switched off."""

NotNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainConfig(_Options):
    """ART's `TrainConfig`: `beta` is that of 0.4, `kl_penalty_coef` that of 0.5."""

    learning_rate: Positive = CLIENT_RATES[0]
    beta: NotNegative = 0.0
    kl_penalty_coef: NotNegative = 0.0


class DevConfig(_Options):
    """ART's `dev.TrainConfig`. What is left out is as this server has it."""

    epsilon: Positive | None = None
    epsilon_high: Positive | None = None
    importance_sampling_level: Literal["token", "sequence"] = "token"
    kl_penalty_coef: NotNegative = 0.0
    logprob_calculation_chunk_size: int | None = None
    ppo: bool | None = None
    scale_rewards: bool = True
    advantage_balance: Off = None
    allow_training_without_logprobs: Off = None
    kimi_k2_tau: Off = None
    kl_ref_adapter_path: Off = None
    mask_prob_ratio: Off = None
    max_negative_advantage_importance_sampling_weight: Off = None
    num_trajectories_learning_rate_multiplier_power: Off = None
    plot_tensors: Off = None
    precalculate_logprobs: Off = None
    scale_learning_rate_by_reward_std_dev: Off = None
    truncated_importance_sampling: Off = None

    @model_validator(mode="after")
    def _clips_above(self) -> DevConfig:
        if self.ppo is False and self.epsilon is not None and self.epsilon < 1:
            raise ValueError("epsilon: without ppo, weights are only cut above here; leave it out")
        if self.ppo is not False and self.epsilon is not None and self.epsilon >= 1:
            raise ValueError("epsilon: must be less than 1 where ratios are clipped on both sides")
        return self

    @property
    def loss(self) -> dict[str, Any]:
        """The hyperparameters of the loss, as far as they were given."""
        given: dict[str, Any] = {"ratio": self.importance_sampling_level}
        if not self.scale_rewards:
            given["advantage_scale"] = "none"
        if self.ppo is False:
            return given | {"surrogate": "cispo", "clip_high": self.epsilon_high or _CISPO_HIGH}
        low = self.epsilon or (_PPO_EPSILON if self.ppo else None)
        high = self.epsilon_high or low
        return (
            given | ({} if low is None else {"clip_low": low}) | ({} if high is None else {"clip_high": high})
        )


class PeftArgs(_Options):
    """ART's `PeftArgs`: the shape of the LoRA weights."""

    r: int | None = Field(default=None, ge=0)
    lora_alpha: Positive | None = None
    target_modules: Annotated[list[str] | None, AfterValidator(_linear)] = None
    bias: Literal["none"] = "none"
    init_lora_weights: Literal[True] = True
    lora_dropout: Off = None
    layers_to_transform: Off = None
    layers_pattern: Off = None
    use_rslora: Off = None
    modules_to_save: Off = None
    loftq_config: Off = None
    use_gradient_checkpointing: Any = None
    random_state: Any = None
    max_seq_length: Any = None
    temporary_location: Any = None


class TrainerArgs(BaseModel):
    """ART's `TrainerArgs`, of which there are 130."""

    model_config = ConfigDict(extra="allow", frozen=True)

    learning_rate: Positive | None = None
    beta: NotNegative | None = None

    @model_validator(mode="after")
    def _others_are_so_anyway(self) -> TrainerArgs:
        for name, value in (self.model_extra or {}).items():
            if value is None or name.startswith(_REPORTS):
                continue
            if name not in _ALSO_SO:
                raise ValueError(f"{name}: this server has no such option; leave it out")
            if value != _ALSO_SO[name]:
                raise ValueError(f"{name}: can only be {_ALSO_SO[name]} here")
        return self


class InternalConfig(_Options):
    """ART's `InternalModelConfig`."""

    init_args: dict[str, Any] | None = None
    engine_args: dict[str, Any] | None = None
    peft_args: PeftArgs | None = None
    trainer_args: TrainerArgs | None = None
    trainer_gpu_ids: list[int] | None = None
    inference_gpu_ids: list[int] | None = None
    tinker_args: Off = None
    tinker_native_args: Off = None
    torchtune_args: Off = None
    decouple: Any = Field(default=None, alias="_decouple_vllm_and_unsloth")

    @model_validator(mode="after")
    def _is_the_same_model(self) -> InternalConfig:
        for kind in ("init_args", "engine_args"):
            _check_same_model(kind, getattr(self, kind))
        return self


class ServerConfig(_Options):
    """ART's `OpenAIServerConfig`."""

    log_file: str | None = None
    server_args: dict[str, Any] | None = None
    engine_args: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_the_same_model(self) -> ServerConfig:
        for kind in ("server_args", "engine_args"):
            _check_same_model(kind, getattr(self, kind))
        return self


def _check_same_model(kind: str, arguments: dict[str, Any] | None) -> None:
    """Raise ValueError for arguments that are about more than where and how the model runs."""
    for name in _OTHER_MODEL[kind]:
        if (arguments or {}).get(name):
            raise ValueError(f"{kind}.{name}: this server's model is as it is; leave it out")


def hyperparameters(internal: InternalConfig | None, config: TrainConfig, dev: DevConfig) -> Hyperparameters:
    """The hyperparameters of a job. As with ART, all trajectories weigh alike, in one optimiser step.

    A learning rate and a KL weight that the model was registered with hold where the request has only its
    client's defaults. ART has two forms of KL; either is the one of this server's loss, to the base
    model. Raises ValueError when two different weights are given.
    """
    trainer = (internal and internal.trainer_args) or TrainerArgs()
    peft = (internal and internal.peft_args) or PeftArgs()
    asked = {value for value in (config.beta, config.kl_penalty_coef, dev.kl_penalty_coef) if value}
    if len(asked) > 1:
        values = " and ".join(f"{value:g}" for value in sorted(asked))
        raise ValueError(f"beta and kl_penalty_coef are one here, and they are {values}; give one of them")
    rate = config.learning_rate
    if trainer.learning_rate is not None and rate in CLIENT_RATES:
        rate = trainer.learning_rate
    rank = 0 if internal and (internal.init_args or {}).get("full_finetuning") else peft.r
    return hyperparameters_for(
        "grpo",
        learning_rate=rate,
        beta=asked.pop() if asked else trainer.beta,
        reference="base",
        aggregation="sequence",
        lora_rank=rank,
        lora_alpha=peft.lora_alpha,
        **dev.loss,
    )

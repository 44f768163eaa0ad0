"""TRL's side of learning.py: its GRPOTrainer, sampling by transformers' `generate`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learning_task import Clock, Course, make_prompt, right_order

import etude
from etude.core.episode import Example
from etude.learner.learner import LearnerOptions
from etude.models.device import choose_dtype, limit_threads
from etude.models.source import locate
from etude.store.episodes import EVALUATION

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import datasets
    import peft
    import torch
    import transformers
    import trl

PARAMETERS = 135_000_000
ROWS = 4
"""Trained on at a time, to spare memory: 16 take 9 GB. All are sampled at once."""


def train(course: Course, clock: Clock) -> list[list[float]]:
    """Train; the held-out rewards before the first part and after each."""
    limit_threads()
    base = locate(course.model)
    lora = course.config.trainer_adapters["local"].lora
    # With `auto`, Etude's choice for a model of this size.
    dtype = choose_dtype(course.dtype, torch.device("cpu"), PARAMETERS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype),
        reward_funcs=reward,
        args=settings(course),
        train_dataset=rows(course.prompts()),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(
            r=lora.r, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    folders = [Path(base)]

    class Ends(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.before(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if clock.after(state.global_step):
                clock.pause()
                folders.append(course.folder / f"lora-{state.global_step}")
                trainer.model.save_pretrained(folders[-1])
                clock.go_on()

    trainer.add_callback(Ends())
    trainer.train()
    return [measure_rewards(course, folder, base, tokenizer) for folder in folders]


def measure_rewards(course: Course, folder: Path, base: str, tokenizer: Any) -> list[float]:
    """The held-out rewards of the base model, or of LoRA weights in a folder."""
    model = Path(base)
    if folder != model:
        merged = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        merged = peft.PeftModel.from_pretrained(merged, folder).merge_and_unload()
        model = folder / "merged"
        for part in (merged, tokenizer):
            part.save_pretrained(model)
    data = {**course.data, "finetuning": {**course.data["finetuning"], "enabled": False}}
    held_out = data["finetuning"]["run_configuration"]["validation_dataset"]
    changes = ["llms.policy.dtype=float32", f"eval.general.dataset={json.dumps(held_out)}"]
    run = etude.evaluate(data, model=str(model), overrides=changes, progress=False)
    return course.rewards(run.folder, EVALUATION)


def reward(completions: Sequence[Any], example: Sequence[dict[str, Any]], **_: Any) -> list[float]:
    """The task's evaluator as TRL calls one."""
    answers = (messages[0]["content"] for messages in completions)
    return [right_order(Example(**one), answer) for one, answer in zip(example, answers, strict=True)]


def rows(examples: Sequence[Example]) -> Any:
    """The examples as TRL takes them."""
    prompts = [make_prompt({}, one.inputs["question"]) for one in examples]
    given = [{"id": one.id, "inputs": one.inputs, "expected": one.expected} for one in examples]
    return datasets.Dataset.from_dict({"prompt": prompts, "example": given})


def settings(course: Course) -> Any:
    """Etude's settings by the names that TRL has for them, and what makes it fast here."""
    builder, llm = course.builder, course.config.llms["policy"]
    adapter = course.config.trainer_adapters["local"]
    beta1, beta2 = LearnerOptions().betas
    return trl.GRPOConfig(
        output_dir=str(course.folder / "trl"),
        seed=course.seed,
        max_steps=course.steps,
        shuffle_dataset=False,
        num_generations=builder.num_generations,
        temperature=llm.temperature,
        top_p=llm.top_p,
        max_completion_length=llm.max_tokens,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=builder.clip_low,
        epsilon_high=builder.clip_high,
        beta=builder.beta,
        learning_rate=adapter.rate,
        lr_scheduler_type=adapter.lr_schedule,
        warmup_steps=adapter.warmup_steps,
        weight_decay=adapter.weight_decay,
        adam_beta1=beta1,
        adam_beta2=beta2,
        max_grad_norm=adapter.max_grad_norm,
        per_device_train_batch_size=min(ROWS, course.episodes_per_step),
        gradient_accumulation_steps=max(1, course.episodes_per_step // ROWS),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

"""TRL's side of learning.py: its GRPOTrainer, sampling by transformers' `generate`."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learning_task import Clock, Course

from etude.config.import_path import import_object, make_importable
from etude.core.example import Example
from etude.learner.learner import LearnerOptions
from etude.models.device import limit_threads

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import datasets
    import torch
    import transformers
    import trl

ROWS = 128
"""Trained on at a time: the fastest of 32, 64 and 128 for the smaller models. All are sampled at once."""


def train(course: Course, clock: Clock, folder: Path) -> None:
    """Train, and write the model of each tenth into the folder of its number, from 1 on."""
    limit_threads()
    make_importable(course.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(course.base, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(course.base)
    with tempfile.TemporaryDirectory() as own:
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward_of(import_object("agent:in_place")),
            args=settings(course, own),
            train_dataset=rows(course.prompts()),
            processing_class=tokenizer,
        )

        def save() -> None:
            for part in (trainer.model, tokenizer):
                part.save_pretrained(folder / str(len(clock.ends)))

        class Ends(transformers.TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                clock.before(state.global_step + 1)

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if clock.after(state.global_step):
                    clock.leave_out(save)

        trainer.add_callback(Ends())
        trainer.train()


def reward_of(score: Any) -> Any:
    """The example's evaluator as TRL calls one."""

    def reward(completions: Sequence[Any], example: Sequence[dict[str, Any]], **_: Any) -> list[float]:
        answers = (messages[0]["content"] for messages in completions)
        return [score(Example(**one), answer) for one, answer in zip(example, answers, strict=True)]

    return reward


def rows(examples: Sequence[Example]) -> Any:
    """The examples as TRL takes them; the prompts are the agent's."""
    prompts = [[{"role": "user", "content": f"Sort: {one.inputs['letters']}"}] for one in examples]
    given = [{"id": one.id, "inputs": one.inputs, "expected": one.expected} for one in examples]
    return datasets.Dataset.from_dict({"prompt": prompts, "example": given})


def settings(course: Course, folder: str) -> Any:
    """Etude's settings by the names that TRL has for them, and what makes it fast here."""
    builder, llm = course.builder, course.config.llms["sorter"]
    adapter = course.config.trainer_adapters["local"]
    beta1, beta2 = LearnerOptions().betas
    return trl.GRPOConfig(
        output_dir=folder,
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
        learning_rate=adapter.learning_rate,
        lr_scheduler_type=adapter.lr_schedule,
        warmup_steps=adapter.warmup_steps,
        weight_decay=adapter.weight_decay,
        adam_beta1=beta1,
        adam_beta2=beta2,
        max_grad_norm=adapter.max_grad_norm,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=course.episodes_per_step // ROWS,
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

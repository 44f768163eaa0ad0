"""TRL's trainers on the same sequences: their loss and its gradient, as their training step makes it."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from etude.core.sample import Sample
from etude.models.policy import Policy

Step = Callable[[], None]

_OPTIONS: dict[str, dict[str, Any]] = {
    "grpo": {
        "loss_type": "bnpo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "num_generations": 8,
        "max_completion_length": 64,
    },
    "dpo": {"beta": 0.1},
    "sft": {},
}
_ROWS = {
    "grpo": {"prompt": ["a"] * 8},
    "dpo": {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]},
    "sft": {"input_ids": [[1, 2, 3]]},
}


def steps(
    method: str, policy: Policy, sequences: Sequence[Sample], at_once: Sequence[int] = (8,)
) -> dict[str, Step]:
    """TRL's way to a gradient of `method`, by its settings: all rows at once, or so many of like length.

    Tensors are made beforehand, and DPO's reference logprobs too. Gradient checkpointing is off. A step
    leaves its gradient in its own copy of the model, which is `.model` of the step.
    """
    trainer = _trainer(method, policy)
    rows = list(sequences)
    by_length = sorted(rows, key=lambda one: len(one.ids)) if method != "dpo" else rows
    cuts = {"all": [rows]}
    for size in at_once:
        cuts[str(size)] = [by_length[at : at + size] for at in range(0, len(rows), size)]
    return {name: _step(method, trainer, cut, policy.device) for name, cut in cuts.items()}


def _trainer(method: str, policy: Policy) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets
        import trl

        kind = method.upper()
        config = getattr(trl, f"{kind}Config")(
            output_dir=tempfile.mkdtemp(),
            use_cpu=policy.device.type == "cpu",
            report_to="none",
            per_device_train_batch_size=8,
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            **_OPTIONS[method],
        )
        more: dict[str, Any] = {}
        if method == "grpo":
            more["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
        if method == "dpo":
            # Never run, as the logprobs are made beforehand; TRL wants it all the same.
            more["ref_model"] = copy.deepcopy(policy.model)
        trainer = getattr(trl, f"{kind}Trainer")(
            model=copy.deepcopy(policy.model),
            args=config,
            train_dataset=datasets.Dataset.from_dict(_ROWS[method]),
            processing_class=policy.tokenizer,
            **more,
        )
    trainer.precompute_ref_logps = True
    return trainer


def _step(method: str, trainer: Any, cut: Sequence[Sequence[Sample]], device: torch.device) -> Step:
    made = [_INPUTS[method](rows) for rows in cut]
    inputs = [{name: value.to(device) for name, value in one.items()} for one in made]

    def step() -> None:
        trainer.model.zero_grad(set_to_none=True)
        for one in inputs:
            if method == "sft":
                loss = trainer.compute_loss(trainer.model, dict(one))
            elif method == "dpo":
                loss = trainer._compute_loss(trainer.model, dict(one), False)
            else:
                loss = trainer._compute_loss(trainer.model, dict(one))
            (loss / len(inputs)).backward()

    step.model = trainer.model  # type: ignore[attr-defined]
    return step


def _grpo(rows: Sequence[Sample]) -> dict[str, torch.Tensor]:
    prompts = [[i for i, w in zip(one.ids, one.loss_weights, strict=True) if not w] for one in rows]
    completions = [one.ids[len(prompt) :] for one, prompt in zip(rows, prompts, strict=True)]
    return {
        "prompt_ids": _padded(prompts, left=True),
        "prompt_mask": _padded([[1] * len(prompt) for prompt in prompts], left=True),
        "completion_ids": _padded(completions),
        "completion_mask": _padded([[1] * len(completion) for completion in completions]),
        "advantages": torch.tensor([one.advantages[-1] for one in rows]),
        "old_per_token_logps": _padded(
            [one.logprobs[-len(c) :] for one, c in zip(rows, completions, strict=True)]
        ),
    }


def _dpo(rows: Sequence[Sample]) -> dict[str, torch.Tensor]:
    ordered = [*rows[0::2], *rows[1::2]]
    reference = torch.tensor([sum(one.logprobs) for one in ordered])
    return {
        "input_ids": _padded([one.ids for one in ordered]),
        "attention_mask": _padded([[1] * len(one.ids) for one in ordered]),
        "completion_mask": _padded([[int(weight) for weight in one.loss_weights] for one in ordered]),
        "ref_chosen_logps": reference[: len(ordered) // 2],
        "ref_rejected_logps": reference[len(ordered) // 2 :],
    }


def _sft(rows: Sequence[Sample]) -> dict[str, torch.Tensor]:
    ids, trained = _padded([one.ids for one in rows]), _padded([one.loss_weights for one in rows])
    return {
        "input_ids": ids,
        "attention_mask": _padded([[1] * len(one.ids) for one in rows]),
        "labels": ids.masked_fill(trained == 0, -100),
    }


_INPUTS = {"grpo": _grpo, "dpo": _dpo, "sft": _sft}


def _padded(rows: Sequence[Sequence[float]], *, left: bool = False) -> torch.Tensor:
    width = max(map(len, rows))
    filled = [[0] * (width - len(row)) for row in rows]
    pairs = zip(rows, filled, strict=True)
    return torch.tensor([[*space, *row] if left else [*row, *space] for row, space in pairs])

"""The targets of a config: what each leaves out, and what they must not have in common."""

from __future__ import annotations

import re

from etude.config.document import KeyPath, dotted
from etude.config.finetuning import RewardFunctionConfig, TargetConfig
from etude.config.names import check_name, choose
from etude.config.problems import Problems
from etude.config.schema import Config

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def complete_targets(config: Config, problems: Problems) -> None:
    """Fill in what the targets leave out, and check the names that they give."""
    finetuning = config.finetuning
    if finetuning.target_model is not None:
        problems.add(
            ("finetuning", "target_model"),
            "finetuning.target_model: the models to train are those of 'finetuning.targets'; remove this key",
        )
    for name, target in finetuning.targets.items():
        path: KeyPath = ("finetuning", "targets", name)
        if not _NAME.fullmatch(name):
            problems.add(
                path, f"{dotted(path)}: a target's name is made of letters, digits, '-', '_' and '.'"
            )
        _complete(path, name, target, config, problems)
    _check_together(config, problems)


def _complete(path: KeyPath, name: str, target: TargetConfig, config: Config, problems: Problems) -> None:
    finetuning = config.finetuning
    if target.model is None:
        target.model = name
        if name not in config.llms:
            problems.add(path, f"key '{dotted(path)}.model' is missing: 'llms' has no model '{name}'")
    else:
        check_name((*path, "model"), "llms", target.model, config, problems)
    builder = target.trajectory_builder or finetuning.named("trajectory_builder")
    adapter = target.trainer_adapter or finetuning.named("trainer_adapter")
    reward = target.reward_function or finetuning.reward_function
    target.trajectory_builder = choose(
        (*path, "trajectory_builder"), builder, "trajectory_builders", config, problems
    )
    target.trainer_adapter = choose((*path, "trainer_adapter"), adapter, "trainer_adapters", config, problems)
    evaluator = choose(
        (*path, "reward_function"), reward.name if reward else None, "evaluators", config, problems
    )
    target.reward_function = RewardFunctionConfig(name=evaluator) if evaluator else None
    if target.target_functions is None:
        # The model says which calls are meant, whichever function makes them.
        named = "target_functions" in finetuning.model_fields_set
        target.target_functions = list(finetuning.target_functions) if named else ["*"]
    target.curriculum_learning = target.curriculum_learning or finetuning.curriculum_learning


def _check_together(config: Config, problems: Problems) -> None:
    targets = config.finetuning.targets
    trained_by: dict[str, str] = {}
    for name, target in targets.items():
        first = trained_by.setdefault(str(target.model), name)
        if first != name:
            path: KeyPath = ("finetuning", "targets", name, "model")
            problems.add(
                path,
                f"{dotted(path)}: the model '{target.model}' is trained by the target '{first}' already; "
                "two targets cannot train one model",
            )
    if targets and all(target.frozen for target in targets.values()):
        problems.add(("finetuning", "targets"), "finetuning.targets: all of them are frozen; train one")

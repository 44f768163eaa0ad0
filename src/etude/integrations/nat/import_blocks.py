"""The blocks of a NeMo Agent Toolkit config: `eval`, and those that are about training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.integrations.art.config import ArtBackendConfig, ArtTrainingConfig
from etude.integrations.nat.import_notes import Notes
from etude.integrations.nat.llms import plain_type

Json = dict[str, Any]

_FILES = {"json", "jsonl", "csv", "parquet"}
_LEAST_DIFFERENCE = 0.01
_CURRICULUM = (
    "enabled",
    "initial_percentile",
    "increment_percentile",
    "expansion_interval",
    "sort_ascending",
)
_PLAIN = ("enabled", "trainer", "trajectory_builder", "trainer_adapter", "num_epochs", "output_dir")


def eval_of(functions: dict[str, str], folder: Path, notes: Notes) -> Json:
    """The whole block. `functions` has the Python function of each evaluator; `folder` is the file's."""
    data, general = notes.block("eval"), notes.block("eval", "general")
    block: Json = {key: general[key] for key in ("max_concurrency", "output_dir") if general.get(key)}
    path = ("eval", "general")
    dataset = general.get("dataset")
    if isinstance(dataset, dict):
        made = dataset_of(dataset, (*path, "dataset"), folder, notes)
        block |= {"dataset": made} if made else {}
    elif dataset is not None:
        block["dataset"] = file_path(dataset, (*path, "dataset"), folder, notes)
    else:
        notes.add(path, "there is no dataset; add `eval.general.dataset`")
    notes.unmapped(path, general, ["max_concurrency", "output_dir", "dataset"])
    notes.unmapped(("eval",), data, ["general", "evaluators"])
    for name, evaluator in notes.block("eval", "evaluators").items():
        function = functions[str(name)]
        kind = evaluator.get("_type") if isinstance(evaluator, dict) else evaluator
        notes.add(
            ("eval", "evaluators", name),
            f"the evaluator `{kind}` is code of the toolkit: write it as the function {function}, which "
            "for now compares the output with the expected answer",
        )
    return {"general": block, "evaluators": dict(functions)}


def dataset_of(data: Json, path: tuple[str, ...], folder: Path, notes: Notes) -> Json | None:
    """A dataset; None when there is no counterpart."""
    kind = str(data.get("_type"))
    taken = ["file_path", "id_key", "structure"]
    if kind == "custom" and isinstance(data.get("function"), str):
        module, _, name = data["function"].replace(":", ".").rpartition(".")
        notes.add(path, "its function has to return rows (dicts) or `etude.Example`s, not an EvalInput")
        notes.unmapped(path, data, [*taken, "function", "kwargs"])
        block: Json = {
            "_type": "python",
            "function": f"{module}:{name}",
            "arguments": data.get("kwargs") or {},
        }
    elif kind in _FILES and data.get("file_path"):
        notes.unmapped(path, data, taken)
        block = {
            "_type": kind,
            "file_path": file_path(data["file_path"], (*path, "file_path"), folder, notes),
        }
    else:
        notes.add(
            path, f"`_type: {kind}` is not read here; write the rows as JSON lines or CSV, and name them"
        )
        return None
    structure = notes.block(*path, "structure")
    columns = {key: structure[key] for key in ("question_key", "answer_key") if structure.get(key)}
    notes.unmapped((*path, "structure"), structure, columns)
    block |= {"id_key": data["id_key"]} if data.get("id_key") else {}
    return block | ({"structure": columns} if columns else {})


def file_path(written: Any, path: tuple[str, ...], folder: Path, notes: Notes) -> str:
    """A file by its absolute path: looked for where the toolkit runs, then beside the config."""
    for base in (Path.cwd(), folder):
        if (base / str(written)).exists():
            return str((base / str(written)).resolve())
    notes.add(path, f"there is no file {written}; put it there, or change the path")
    return str(written)


def builder_of(name: str, notes: Notes) -> Json:
    """An entry of `trajectory_builders`."""
    path = ("trajectory_builders", name)
    data = notes.block(*path)
    kind = plain_type(data.get("_type"))
    if kind == "dpo_traj_builder":
        return _dpo_builder(path, data, notes)
    generations = data.get("num_generations", 2)
    if kind != "openpipe_art_traj_builder":
        notes.add(path, f"`_type: {kind}` has no counterpart, and became `grpo`")
        generations = 8 if generations == 2 else generations
    if generations == 1:
        notes.add((*path, "num_generations"), "became 2: groups are by example, and one episode is no group")
        generations = 2
    notes.unmapped(path, data, ["num_generations", "reward"])
    return {"_type": "grpo", "num_generations": generations}


def adapter_of(name: str, notes: Notes) -> Json:
    """An entry of `trainer_adapters`."""
    path = ("trainer_adapters", name)
    data = notes.block(*path)
    kind = plain_type(data.get("_type"))
    if kind == "openpipe_art_trainer_adapter":
        return _art_adapter(path, data, notes)
    if kind == "nemo_customizer_trainer_adapter":
        notes.add(path, "NeMo Customizer became `local`: this process trains the model")
        return _local_adapter(path, data, notes)
    notes.add(path, f"`_type: {kind}` has no counterpart, and became `local`")
    notes.unmapped(path, data, ["reward"])
    return {"_type": "local"}


def trainer_of(name: str, notes: Notes) -> Json:
    """An entry of `trainers`."""
    path = ("trainers", name)
    data = notes.block(*path)
    kind = plain_type(data.get("_type"))
    if kind not in ("openpipe_art_trainer", "nemo_customizer_trainer"):
        notes.add(path, f"`_type: {kind}` has no counterpart, and became `epochs`")
    notes.unmapped(path, data, ["reward", "num_runs"])
    return {"_type": "epochs"}


def finetuning_of(llms: dict[str, Json], runs: int | None, folder: Path, notes: Notes) -> Json:
    """The block `finetuning`. `runs` is how often the Customizer's trainer collects, where it is that one."""
    path, data = ("finetuning",), notes.block("finetuning")
    block: Json = {key: data[key] for key in _PLAIN if data.get(key) is not None}
    if runs is not None:
        block["num_epochs"] = runs
    reward = notes.block(*path, "reward_function")
    if reward.get("name"):
        block["reward_function"] = {"name": reward["name"]}
    if data.get("target_functions") not in (None, ["<workflow>"]):
        notes.add(
            (*path, "target_functions"),
            "left out: give the agent's functions their names (`episode.function`), and name them here",
        )
    if data.get("target_model") is not None:
        block |= _target_model(str(data["target_model"]), llms, notes)
    if data.get("curriculum_learning"):
        block["curriculum_learning"] = _curriculum(notes)
    if data.get("run_configuration"):
        block["run_configuration"] = _run_configuration(folder, notes)
    taken = (
        "reward_function",
        "target_functions",
        "target_model",
        "curriculum_learning",
        "run_configuration",
    )
    notes.unmapped(path, data, [*_PLAIN, *taken])
    return block


def _dpo_builder(path: tuple[str, str], data: Json, notes: Notes) -> Json:
    least = notes.number(*path, "min_score_diff") or 0.0
    if least < _LEAST_DIFFERENCE:
        notes.add((*path, "min_score_diff"), f"became {_LEAST_DIFFERENCE}: ties are no preferences")
        least = _LEAST_DIFFERENCE
    notes.add(
        path,
        "candidates are compared by the step reward that the agent gives after each (`episode.step_reward`), "
        "not by TTC steps",
    )
    taken = ("exhaustive_pairs", "min_score_diff", "max_pairs_per_turn", "reward")
    notes.unmapped(path, data, taken)
    block: Json = {"_type": "dpo", "compare": "turns", "num_generations": 1, "min_reward_diff": least}
    if not data.get("exhaustive_pairs", True):
        block["pairs"] = "best_vs_worst"
    if data.get("max_pairs_per_turn") is not None:
        block["max_pairs_per_group"] = data["max_pairs_per_turn"]
    # Customizer has the loss's beta with the adapter.
    adapter = notes.name("finetuning", "trainer_adapter") or next(iter(notes.block("trainer_adapters")), "")
    beta = notes.number("trainer_adapters", adapter, "hyperparameters", "dpo", "ref_policy_kl_penalty")
    return block | ({"beta": beta} if beta else {})


def _art_adapter(path: tuple[str, str], data: Json, notes: Notes) -> Json:
    backend, training = notes.block(*path, "backend"), notes.block(*path, "training")
    known = set(ArtTrainingConfig.model_fields)
    options = {key: value for key, value in training.items() if key in known and value is not None}
    rest = {key: value for key, value in training.items() if key not in known and value is not None}
    kept = {key: backend[key] for key in ArtBackendConfig.model_fields if backend.get(key) is not None}
    notes.unmapped((*path, "backend"), backend, kept)
    notes.unmapped(path, data, ["backend", "training", "reward"])
    if training:
        notes.add(
            (*path, "training"), "learning rate and beta reach the server, which the toolkit does not do"
        )
    options |= {"trainer_args": rest} if rest else {}
    return {"_type": "openpipe_art", "backend": kept} | ({"training": options} if options else {})


def _local_adapter(path: tuple[str, str], data: Json, notes: Notes) -> Json:
    given = notes.block(*path, "hyperparameters")
    names = {"learning_rate": "learning_rate", "batch_size": "batch_size", "epochs": "passes"}
    block: Json = {"_type": "local"}
    block |= {ours: given[theirs] for theirs, ours in names.items() if given.get(theirs) is not None}
    if given.get("finetuning_type") == "lora":
        block["lora"] = {}
    where = (*path, "hyperparameters")
    notes.unmapped(where, given, [*names, "dpo", "finetuning_type", "training_type"])
    notes.unmapped((*where, "dpo"), notes.block(*where, "dpo"), ["ref_policy_kl_penalty"])
    notes.unmapped(path, data, ["hyperparameters", "reward"], "left out: nothing is uploaded or deployed")
    return block


def _target_model(written: str, llms: dict[str, Json], notes: Notes) -> Json:
    """The toolkit compares the model's own name; Etude wants the entry of `llms`."""
    if written in llms:
        return {"target_model": written}
    names = [name for name, llm in llms.items() if written in (llm.get("model_name"), llm.get("model"))]
    if len(names) == 1:
        return {"target_model": names[0]}
    notes.add(("finetuning", "target_model"), f"left out: no entry of `llms` is clearly '{written}'")
    return {}


def _curriculum(notes: Notes) -> Json:
    path = ("finetuning", "curriculum_learning")
    data = notes.block(*path)
    block = {key: data[key] for key in _CURRICULUM if data.get(key) is not None}
    least, share = notes.number(*path, "min_reward_diff"), notes.number(*path, "random_subsample")
    if least is not None and least < 0:
        notes.add((*path, "min_reward_diff"), "became 0: no difference is less than that")
    block |= {} if least is None else {"min_reward_diff": max(0, least)}
    if share is not None and 0 < share <= 1:
        block["random_subsample"] = share
    elif share is not None:
        notes.add((*path, "random_subsample"), "left out: a share is above 0 and at most 1")
    notes.unmapped(path, data, [*_CURRICULUM, "min_reward_diff", "random_subsample"])
    return block


def _run_configuration(folder: Path, notes: Notes) -> Json:
    path = ("finetuning", "run_configuration")
    data = notes.block(*path)
    block: Json = {
        key: file_path(data[key], (*path, key), folder, notes)
        for key in ("dataset", "validation_dataset")
        if data.get(key) is not None
    }
    if data.get("validation_interval") is not None:
        block["validation_interval"] = data["validation_interval"]
    notes.unmapped(path, data, [*block, "config_file"])
    return block

"""The block `eval` of a NeMo Agent Toolkit config: examples and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.integrations.nat.import_notes import Notes

Json = dict[str, Any]

_FILES = {"json", "jsonl", "csv", "parquet"}


def eval_of(functions: dict[str, str], folder: Path, notes: Notes) -> Json:
    """The whole block. `functions` has the Python function of each evaluator; `folder` is the file's."""
    data, general = notes.block("eval"), notes.block("eval", "general")
    found: Json = {key: general[key] for key in ("max_concurrency", "output_dir") if general.get(key)}
    path = ("eval", "general")
    dataset = general.get("dataset")
    if isinstance(dataset, dict):
        made = dataset_of(dataset, (*path, "dataset"), folder, notes)
        found |= {"dataset": made} if made else {}
    elif dataset is not None:
        found["dataset"] = file_path(dataset, (*path, "dataset"), folder, notes)
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
    return {"general": found, "evaluators": dict(functions)}


def dataset_of(data: Json, path: tuple[str, ...], folder: Path, notes: Notes) -> Json | None:
    """A dataset; None when there is no counterpart."""
    kind = str(data.get("_type"))
    taken = ["file_path", "id_key", "structure"]
    if kind == "custom" and isinstance(data.get("function"), str):
        module, _, name = data["function"].replace(":", ".").rpartition(".")
        notes.add(path, "its function has to return rows (dicts) or `etude.Example`s, not an EvalInput")
        notes.unmapped(path, data, [*taken, "function", "kwargs"])
        found: Json = {
            "_type": "python",
            "function": f"{module}:{name}",
            "arguments": data.get("kwargs") or {},
        }
    elif kind in _FILES and data.get("file_path"):
        notes.unmapped(path, data, taken)
        found = {
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
    found |= {"id_key": data["id_key"]} if data.get("id_key") else {}
    return found | ({"structure": columns} if columns else {})


def file_path(written: Any, path: tuple[str, ...], folder: Path, notes: Notes) -> str:
    """A file by its absolute path: looked for where the toolkit runs, then beside the config."""
    for place in (Path.cwd(), folder):
        if (place / str(written)).exists():
            return str((place / str(written)).resolve())
    notes.add(path, f"there is no file {written}; put it there, or change the path")
    return str(written)

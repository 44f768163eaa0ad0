"""Jobs, events and checkpoints as the API presents them."""

from __future__ import annotations

from typing import Any

from etude.server.pages import Row


def job_object(row: Row) -> dict[str, Any]:
    """The `fine_tuning.job` object."""
    values = row["hyperparameters"]
    shown = {key: values[key] for key in ("n_epochs", "batch_size", "learning_rate_multiplier")}
    method = row["method"]
    return {
        "id": row["id"],
        "object": "fine_tuning.job",
        "created_at": int(row["created"]),
        "status": row["status"],
        "model": row["model"],
        "fine_tuned_model": row["fine_tuned_model"],
        "training_file": row["training_file"],
        "validation_file": row["validation_file"],
        "method": {"type": method, method: {"hyperparameters": values}},
        "hyperparameters": shown,
        "suffix": row["suffix"],
        "seed": row["seed"],
        "metadata": row["metadata"],
        "error": row["error"],
        "finished_at": _seconds(row["finished"]),
        "estimated_finish": _seconds(row["estimated_finish"]) if row["status"] == "running" else None,
        "trained_tokens": row["trained_tokens"],
        "result_files": row["result_files"],
        "organization_id": "etude",
        "integrations": [],
    }


def event_object(row: Row) -> dict[str, Any]:
    """The `fine_tuning.job.event` object."""
    return {
        "id": row["id"],
        "object": "fine_tuning.job.event",
        "created_at": int(row["created"]),
        "level": row["level"],
        "type": row["type"],
        "message": row["message"],
        "data": row["data"] or {},
    }


def checkpoint_object(row: Row) -> dict[str, Any]:
    """The `fine_tuning.job.checkpoint` object. It is named by its model, so that pages can go on after it."""
    return {
        "id": row["id"],
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(row["created"]),
        "fine_tuned_model_checkpoint": row["id"],
        "fine_tuning_job_id": row["job"],
        "metrics": row["metrics"],
        "step_number": row["step"],
    }


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)

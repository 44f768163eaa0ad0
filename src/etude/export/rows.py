"""Trajectories as rows of a file: JSON Lines, Parquet, or the rows of OpenAI's fine-tuning API."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.backends.openai_rows import dpo_row, supervised_row
from etude.core.data_model import finite
from etude.core.errors import CapabilityError, MissingExtraError, RequestError
from etude.core.trajectory import DPOItem, EpisodeItem, Method, Trajectory
from etude.export.trajectories import PhaseTrajectories
from etude.store.files import draft_of, open_private
from etude.store.run_folder import RunFolder
from etude.store.stored_config import stored_data, target_names, trained_parts

if TYPE_CHECKING:
    import pyarrow as pa

SEVERAL_TURNS = "pair whose answers take several turns: OpenAI's format has one reply on each side"


@dataclass(slots=True)
class Written:
    """Counts of the rows that were written, and of trajectories that the format has no row for."""

    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


async def write_jsonl(
    path: Path, run: RunFolder, phases: AsyncIterator[PhaseTrajectories], *, openai: bool = False
) -> Written:
    """A line for each trajectory: `run`, `phase`, `target` (where there are several), `group`, `method`,
    and the trajectory's own fields; or what OpenAI takes of those of the methods `supervised` and `dpo`.

    Raises StoreError; the file is there whole or not at all.
    """
    written = Written()
    with draft_of(path) as draft, open_private(draft, "w") as file:
        async for phase in phases:
            for head, trajectory in _numbered(run.name, phase):
                own = head | trajectory.model_dump(mode="json")
                row = openai_row(trajectory, phase.collection.method) if openai else own
                if row is None:
                    written.left_out[SEVERAL_TURNS] += 1
                    continue
                file.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False, default=str) + "\n")
                written.rows += 1
    return written


async def write_parquet(path: Path, run: RunFolder, phases: AsyncIterator[PhaseTrajectories]) -> Written:
    """A row for each trajectory, or for each pair. Free-form parts are columns of JSON text.

    Raises MissingExtraError without pyarrow, StoreError.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("writing Parquet", "data") from error
    written, schema = Written(), _schema(pa)
    with draft_of(path) as draft, pq.ParquetWriter(draft, schema) as writer:
        async for phase in phases:
            numbered = _numbered(run.name, phase)
            rows = [row for head, trajectory in numbered for row in _parquet_rows(head, trajectory)]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            written.rows += len(rows)
    return written


def _numbered(run: str, phase: PhaseTrajectories) -> Iterator[tuple[dict[str, Any], Trajectory]]:
    for number, group in enumerate(phase.collection.trajectories):
        head: dict[str, Any] = {
            "run": run,
            "phase": phase.phase,
            "target": phase.target,
            "group": number,
            "method": phase.collection.method,
        }
        for trajectory in group:
            yield head, trajectory


def _parquet_rows(head: dict[str, Any], trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    metadata = trajectory.metadata or {}
    row = head | {
        "id": metadata.get("id"),
        "generation": metadata.get("generation"),
        "reward": trajectory.reward,
        "shaped_rewards": trajectory.shaped_rewards,
        "metadata": _json(metadata),
    }
    pairs = [item for item in trajectory.episode if isinstance(item, DPOItem)]
    for pair in pairs:
        fields = pair.model_dump(mode="json")
        texts = {name: _json(fields[name]) for name in ("prompt", "chosen_message", "rejected_message")}
        yield row | fields | texts
    if not pairs:
        items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
        yield row | {"items": [_item(item) for item in items]}


def _item(item: EpisodeItem) -> dict[str, Any]:
    plain = isinstance(item.logprobs, list | tuple)
    return {
        "role": str(item.role),
        "content": item.content,
        "reasoning_content": (item.metadata or {}).get("reasoning_content"),
        "finish_reason": item.finish_reason if item.is_sampled else None,
        "token_ids": item.token_ids,
        "context_ids": item.context_ids,
        "logprobs": item.logprobs if plain else None,
        "metadata": _json(item.metadata),
    }


def _json(value: Any) -> str | None:
    return json.dumps(finite(value), ensure_ascii=False, default=str) if value is not None else None


def _schema(pa: Any) -> pa.Schema:
    ids, numbers, marks = pa.list_(pa.int32()), pa.list_(pa.float64()), pa.list_(pa.bool_())
    item = dict.fromkeys(("role", "content", "reasoning_content", "finish_reason", "metadata"), pa.string())
    item |= {"token_ids": ids, "context_ids": ids, "logprobs": numbers}
    texts = dict.fromkeys(("run", "phase", "target", "method", "id", "metadata"), pa.string())
    sides = ("chosen_response", "rejected_response", "chosen_message", "rejected_message")
    pair = dict.fromkeys(("prompt", *sides), pa.string())
    pair |= dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids"), ids)
    pair |= dict.fromkeys(("chosen_logprobs", "rejected_logprobs"), numbers)
    pair |= dict.fromkeys(("chosen_mask", "rejected_mask"), marks)
    numbers_of = {"group": pa.int32(), "generation": pa.int32(), "reward": pa.float64()}
    items = pa.list_(pa.struct(item))
    return pa.schema({**texts, **numbers_of, "shaped_rewards": numbers, "items": items, **pair})


def openai_row(trajectory: Trajectory, method: Method) -> dict[str, Any] | None:
    """The row of a trajectory; None when OpenAI's format has no place for it."""
    if method != "dpo":
        return supervised_row(trajectory)
    try:
        return dpo_row(trajectory.episode[0], trajectory.tools)
    except CapabilityError:
        return None


def require_openai_method(run: Path, method: str | None) -> None:
    """Raise RequestError when a run's own trajectories are for a method without such rows."""
    data = stored_data(run)
    made = [method] if method else [trained_parts(data, name)["method"] for name in target_names(data)]
    if "grpo" in made:
        raise RequestError(
            "OpenAI's rows are for supervised and dpo training, and these trajectories are for grpo; "
            "add --method supervised (the best episodes) or --method dpo (better against worse)"
        )

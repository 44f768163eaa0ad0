"""Trajectories as rows of a file: JSON Lines, or Parquet with a column for each thing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.core.data_model import finite
from etude.core.errors import MissingExtraError
from etude.core.trajectory import DPOItem, EpisodeItem, Trajectory
from etude.export.trajectories import PhaseTrajectories
from etude.store.files import draft_of

if TYPE_CHECKING:
    import pyarrow as pa


async def write_jsonl(path: Path, run: str, phases: AsyncIterator[PhaseTrajectories]) -> int:
    """A line for each trajectory: `run`, `phase`, `target` (where there are several), `group`, `method`,
    and the trajectory's own fields.

    Returns the number of lines. Raises StoreError; the file is there whole or not at all.
    """
    count = 0
    with draft_of(path) as draft, draft.open("w", encoding="utf-8") as file:
        async for phase in phases:
            for head, trajectory in _numbered(run, phase):
                row = head | trajectory.model_dump(mode="json")
                file.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n")
                count += 1
    return count


async def write_parquet(path: Path, run: str, phases: AsyncIterator[PhaseTrajectories]) -> int:
    """A row for each trajectory, or for each pair. Free-form parts are columns of JSON text.

    Returns the number of rows. Raises MissingExtraError without pyarrow, StoreError.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("writing Parquet", "data") from error
    count, schema = 0, _schema(pa)
    with draft_of(path) as draft, pq.ParquetWriter(draft, schema) as writer:
        async for phase in phases:
            rows = [row for head, one in _numbered(run, phase) for row in _parquet_rows(head, one)]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            count += len(rows)
    return count


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
        yield row | _pair(pair)
    if not pairs:
        items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
        yield row | {"items": [_item(item) for item in items]}


def _item(item: EpisodeItem) -> dict[str, Any]:
    plain = isinstance(item.logprobs, list | tuple)
    return {
        "role": str(item.role),
        "content": item.content,
        "token_ids": item.token_ids,
        "context_ids": item.context_ids,
        "logprobs": item.logprobs if plain else None,
        "metadata": _json(item.metadata),
    }


def _pair(item: DPOItem) -> dict[str, Any]:
    fields = item.model_dump(mode="json")
    return fields | {"prompt": _json(fields["prompt"])}


def _json(value: Any) -> str | None:
    return json.dumps(finite(value), ensure_ascii=False, default=str) if value is not None else None


def _schema(pa: Any) -> pa.Schema:
    ids, numbers, marks = pa.list_(pa.int32()), pa.list_(pa.float64()), pa.list_(pa.bool_())
    item = pa.struct(
        {
            "role": pa.string(),
            "content": pa.string(),
            "token_ids": ids,
            "context_ids": ids,
            "logprobs": numbers,
            "metadata": pa.string(),
        }
    )
    texts = dict.fromkeys(("run", "phase", "target", "method", "id", "metadata"), pa.string())
    pair = dict.fromkeys(("prompt", "chosen_response", "rejected_response"), pa.string())
    pair |= dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids"), ids)
    pair |= dict.fromkeys(("chosen_logprobs", "rejected_logprobs"), numbers)
    pair |= dict.fromkeys(("chosen_mask", "rejected_mask"), marks)
    numbers_of = {"group": pa.int32(), "generation": pa.int32(), "reward": pa.float64()}
    return pa.schema({**texts, **numbers_of, "shaped_rewards": numbers, "items": pa.list_(item), **pair})

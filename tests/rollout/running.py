"""Running workflows in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.core.episode import EpisodeRecord, Example
from etude.core.interfaces import Engine
from etude.engines.embedded import EmbeddedEngine
from etude.models.tiny import TinyShape, build_policy, build_tokenizer
from etude.rollout.collector import Collector, EpisodeJob, Limits
from etude.rollout.workflow import as_workflow
from etude.store.journal import Journal
from tests.support import EchoEngine


def examples(count: int) -> list[Example]:
    return [Example(str(index), {"question": f"What is {index}?"}, str(index)) for index in range(count)]


def jobs(count: int, **fields: Any) -> list[EpisodeJob]:
    return [EpisodeJob(f"train/{example.id}/0", example, **fields) for example in examples(count)]


async def collect(
    workflow: Callable[..., Any],
    journal: Journal,
    *,
    engine: Engine | None = None,
    models: dict[str, Engine] | None = None,
    work: Iterable[EpisodeJob] | None = None,
    limits: Limits | None = None,
    **settings: Any,
) -> list[EpisodeRecord]:
    """All episodes, sorted by id, from one example unless `work` says otherwise."""
    engines = models or {"policy": engine or EchoEngine()}
    collector = Collector(as_workflow(workflow), engines, journal, limits=limits or Limits(), **settings)
    async with aclosing(collector.collect(jobs(1) if work is None else work)) as records:
        return sorted([record async for record in records], key=lambda record: record.id)


async def collect_one(workflow: Callable[..., Any], journal: Journal, **settings: Any) -> EpisodeRecord:
    [record] = await collect(workflow, journal, **settings)
    return record


def timeless(records: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """The records without how long they took."""
    return [replace(record, seconds=0.0) for record in records]


def tiny_engine() -> EmbeddedEngine:
    """A model that is sampled here, of 300 tokens and with a context of 256."""
    tokenizer = build_tokenizer(["what is 1 + 2? it is 3. yes or no? yes, no."], vocab_size=300)
    shape = TinyShape(hidden_size=32, heads=2, intermediate_size=48, max_context=256)
    return EmbeddedEngine(build_policy(tokenizer, 0, shape), max_tokens=12)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path

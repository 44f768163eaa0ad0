"""Playing a game of a config, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from etude.config.builder import Builder
from etude.config.load import parse_config
from etude.core.call import ChatRequest
from etude.core.episode import EpisodeRecord, Example
from etude.rollout.collector import EpisodeJob
from etude.store.journal import Journal
from tests.rollout.running import collect
from tests.support import ScriptedEngine

URL = "http://localhost:1/v1"


async def play(
    workflow: dict[str, Any],
    journal: Journal,
    script: Sequence[Any] | Callable[[ChatRequest], Any],
    *,
    models: Sequence[str] = ("policy",),
    examples: Sequence[Example] | None = None,
    games: int = 1,
) -> list[EpisodeRecord]:
    """The episodes of the first examples that the workflow brings, or of these."""
    llms = {name: {"_type": "openai", "model_name": name, "base_url": URL} for name in models}
    async with Builder(parse_config({"llms": llms, "workflow": workflow})) as builder:
        agent = await builder.get_workflow()
        rows = examples or (await builder.get_dataset()).examples()
        engines = dict.fromkeys(models, ScriptedEngine(script))
        work = [EpisodeJob(f"train/1/{row.id}/0", row) for row in rows[:games]]
        return await collect(agent, journal, models=engines, work=work)


def scores(record: EpisodeRecord) -> dict[Any, float | None]:
    """The scores that an episode recorded, by name, or by name and agent."""
    return {
        event.name if event.agent is None else (event.name, event.agent): event.value
        for event in record.events
        if event.kind == "score"
    }

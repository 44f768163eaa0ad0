"""The causes of what failed in a run, each with its count and an episode that shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from etude.core.call import Call
from etude.core.episode import EpisodeRecord
from etude.core.history import Entry
from etude.store.episodes import read_episode
from etude.store.journal import Journal
from etude.store.log import histories
from etude.store.run_folder import RunFolder
from etude.store.summary import causes_in
from etude.view.library import Library
from etude.view.pages import page


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of failures, as its first episode shows it."""

    kind: str
    reason: str
    count: int
    episode: str
    record: EpisodeRecord | None
    """None where the episode is not there any more."""
    error: str
    """The whole message, with the trace where one was kept."""

    @property
    def calls(self) -> list[Call]:
        """The calls of the episode that failed, or were made again."""
        calls = () if self.record is None else self.record.calls
        return [call for call in calls if call.error or call.retried]

    @property
    def logs(self) -> list[str]:
        """The ends of logs that came with it."""
        events = () if self.record is None else self.record.events
        return [event.text for event in events if event.kind == "log"]


def failures_page(request: Request) -> Response:
    """All causes of failed episodes and scores, the most frequent first, and why calls were made again."""
    library: Library = request.app.state.library
    path = library.find(request.path_params["run"])
    result = library.run(path).facts.result or {}
    with RunFolder.read(path) as run:
        entries: list[Entry] = [
            entry for history in histories(run.journal, run.name).values() for entry in history.entries
        ]
        counted = [*causes_in(entries), *(result.get("causes") or [])]
        causes = [_cause(run.journal, each) for each in counted]
    return page(
        request,
        "failures.html",
        run=path.name,
        tab="Failures",
        up=True,
        causes=causes,
        retried=_retried(entries).most_common(),
    )


def _cause(journal: Journal, cause: Mapping[str, Any]) -> Cause:
    id, kind = str(cause["episode"]), str(cause["kind"])
    record = read_episode(journal, id)
    error = "" if record is None or record.failure is None else record.failure.reason
    if kind.startswith("score:"):
        error = str((journal.get(f"{id}/score/{kind.removeprefix('score:')}") or {}).get("error") or "")
    return Cause(kind, str(cause["reason"]), int(cause["count"]), id, record, error)


def _retried(entries: Iterable[Entry]) -> Counter[str]:
    counts = Counter[str]()
    for entry in entries:
        counts.update((entry.metrics.get("remote") or {}).get("retried") or {})
    return counts

"""The spans that a run sends with `report: otel`, as collectors write them, are imported as its chats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.core.message import message_key
from etude.store.episodes import iter_episodes
from etude.store.run_folder import RunFolder
from etude.traces.importing import read_log
from tests.cli.projects import change, etude
from tests.trackers import test_otel
from tests.trackers.test_otel import Receiver

receiver = test_otel.receiver
"""The collector on loopback."""


def test_the_spans_of_a_run_are_imported_as_its_episodes(project: Path, receiver: Receiver):
    json_format = pytest.importorskip("google.protobuf.json_format")
    (project / "agent.py").write_text(test_otel.AGENT)
    change(
        project / "config.yml",
        report={"_type": "otel", "endpoint": receiver.url, "content": True},
        tools={"sums": {"_type": "functions", "functions": ["agent:add"]}},
        eval__evaluators={"correct": "agent:correct"},
        finetuning__num_epochs=1,
    )
    trained = etude("train", "config.yml", "--name", "one")
    assert trained.exit_code == 0, trained.stdout + trained.stderr
    spans = []
    for span in receiver.spans:
        line = json_format.MessageToDict(span)
        ids = {
            "traceId": span.trace_id.hex(),
            "spanId": span.span_id.hex(),
        }  # As OTLP has them, and not base64.
        spans.append({"resourceSpans": [{"scopeSpans": [{"spans": [line | ids]}]}]})
    log = project / "spans.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in spans), encoding="utf-8")
    imported, facts = read_log([log], hold_out=0)
    with RunFolder.read(Path("runs/one")) as run:
        played = [*iter_episodes(run.journal, "train/"), *iter_episodes(run.journal, "validation/")]
    assert facts.chats == len(played) and len(facts.left_out) == 2
    assert facts.scores == {"correct": sum(episode.failure is None for episode in played)}

    def said(episodes):
        calls = [call for episode in episodes for call in episode.calls]
        return sorted(
            (
                *map(message_key, [*call.request.messages, call.completion.message]),
                call.completion.usage,
                call.completion.finish_reason,
            )
            for call in calls
        )

    assert [*map(str, said(imported))] == [*map(str, said(played))]
    began = {call.began for episode in imported for call in episode.calls}
    assert all(any(abs(call.began - at) < 1e-3 for at in began) for each in played for call in each.calls)

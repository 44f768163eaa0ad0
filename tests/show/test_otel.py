"""Spans at an OTLP receiver that decodes the real protobuf."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cli.projects import change, etude, process, succeed
from tests.json_server import JsonServer
from tests.support import wait_until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

AGENT = '''
import etude


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> str:
    reply = await episode.chat([{"role": "user", "content": example.inputs["question"]}])
    async with episode.tools("sums") as tools:
        await tools.call(etude.ToolCall("c1", "add", {"a": 1, "b": 2}, "{}"))
    if example.id == "t1" and episode.generation == 0:
        raise ValueError("no more")
    return reply.text


@etude.evaluator
def correct(example: etude.Example, output: str) -> float:
    return float(output == example.expected)
'''


class Receiver(JsonServer):
    """A collector that keeps all spans."""

    def __init__(self) -> None:
        super().__init__(self._take)
        self.spans: list[Any] = []
        self.headers: list[Any] = []

    def _take(self, path: str, headers: Any, body: bytes) -> tuple[Any, ...]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert path == "/v1/traces"
        self.headers.append(headers)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return 200, {}

    def has_episode(self, prefix: str) -> bool:
        """Whether there is the span of an episode whose id starts so."""
        ids = (attributes(span)["gen_ai.conversation.id"] for span in self.episodes())
        return any(id.startswith(prefix) for id in ids)

    def episodes(self) -> list[Any]:
        return self.find("invoke_agent")

    def find(self, word: str) -> list[Any]:
        return [span for span in self.spans if span.name.startswith(word)]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as started:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", started.url.removesuffix("/v1"))
        yield started


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_spans_have_their_times_and_parents_and_no_content(project, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=abcd")
    change(project / "config.yml", report="otel")
    assert etude("train", "config.yml", "--name", "one").exit_code == 0
    episodes, calls = receiver.find("invoke_agent"), receiver.find("chat")
    history = [json.loads(line) for line in Path("runs/one/training_metrics.jsonl").read_text().splitlines()]
    assert len(episodes) == sum(line["episodes"] for line in history) + 2 * 2
    assert len(calls) == len(episodes)
    by_id = {span.span_id: span for span in receiver.spans}
    assert len(by_id) == len(receiver.spans)
    for call in calls:
        parent = by_id[call.parent_span_id]
        assert call.trace_id == parent.trace_id
        assert parent.start_time_unix_nano <= call.start_time_unix_nano <= call.end_time_unix_nano
        assert call.end_time_unix_nano <= parent.end_time_unix_nano
        about = attributes(call)
        assert about["gen_ai.operation.name"] == "chat" and about["gen_ai.usage.output_tokens"] > 0
        assert not any("messages" in name for name in about)
    (score,) = [
        event for event in episodes[0].events if attributes(event)["gen_ai.evaluation.name"] == "correct"
    ]
    assert score.name == "gen_ai.evaluation.result"
    assert score.time_unix_nano >= episodes[0].end_time_unix_nano
    assert all(headers["x-key"] == "abcd" for headers in receiver.headers)


def test_what_is_sent_again_after_a_kill_is_the_same_span(project, receiver):
    change(project / "config.yml", report="otel", finetuning__num_epochs=2)
    training = process("train", "config.yml", "--name", "one", folder=project)
    wait_until(lambda: receiver.has_episode("train/1/"))
    training.kill()
    training.wait()
    # Killed before the journal had it that the spans of the epoch were sent.
    with closing(sqlite3.connect("runs/one/run.db")) as journal, journal:
        journal.execute("DELETE FROM steps WHERE key LIKE 'report/%/sent/epoch/%'")
    succeed("resume", "one")
    by_id: dict[bytes, set[bytes]] = {}
    for span in receiver.spans:
        by_id.setdefault(span.span_id, set()).add(span.SerializeToString(deterministic=True))
    assert len(by_id) < len(receiver.spans)
    assert all(len(contents) == 1 for contents in by_id.values())
    assert len({span.span_id for span in receiver.episodes()}) == 2 * 16 + 2 * 2


def test_tools_failures_and_content_where_it_is_asked_for(project, receiver):
    (project / "agent.py").write_text(AGENT)
    change(
        project / "config.yml",
        report={"_type": "otel", "content": True},
        tools={"sums": {"_type": "functions", "functions": ["agent:add"]}},
        eval__evaluators={"correct": "agent:correct"},
        finetuning__num_epochs=1,
    )
    succeed("train", "config.yml", "--name", "one")
    tools = receiver.find("execute_tool add")
    assert tools and attributes(tools[0])["gen_ai.tool.call.result"] == "3"
    assert json.loads(attributes(tools[0])["gen_ai.tool.call.arguments"]) == {"a": 1, "b": 2}
    assert tools[0].start_time_unix_nano > 10**18
    failed = [span for span in receiver.find("invoke_agent") if span.status.code == 2]
    assert failed and attributes(failed[0])["error.type"] == "raised"
    call = attributes(receiver.find("chat")[0])
    (asked,) = json.loads(call["gen_ai.input.messages"])
    assert asked["role"] == "user" and asked["parts"][0]["type"] == "text"
    (answered,) = json.loads(call["gen_ai.output.messages"])
    assert answered["parts"][0]["content"] in ("yes", "no")

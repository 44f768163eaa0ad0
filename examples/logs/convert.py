"""Convert a log of OTLP spans or of Langfuse to rows that `etude import-traces` reads.

python convert.py spans.jsonl > log.jsonl

It reads spans with OpenTelemetry's attributes `gen_ai.input.messages` and `gen_ai.output.messages` from the
collector's file exporter, and Langfuse's GENERATION observations and scores.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
REASONS = {"tool_call": "tool_calls"}


def otlp_rows(line: Row) -> Iterator[Row]:
    """Yield a row for each chat span."""
    scopes = (scope for resource in line.get("resourceSpans", ()) for scope in resource["scopeSpans"])
    for span in (span for scope in scopes for span in scope["spans"]):
        given = _attributes(span.get("attributes", ()))
        output = _parse_json(given.get("gen_ai.output.messages"))
        if not output:
            continue
        system = _parse_json(given.get("gen_ai.system_instructions"))
        asked = [{"role": "system", "parts": system}] if system else []
        tools = _parse_json(given.get("gen_ai.tool.definitions"))
        yield {
            "trace_id": span["traceId"],
            "request": {
                "model": given.get("gen_ai.request.model"),
                "messages": [
                    chat
                    for message in [*asked, *_parse_json(given.get("gen_ai.input.messages"))]
                    for chat in _chat_messages(message["role"], message["parts"])
                ],
                "tools": [{"type": "function", "function": tool.get("function", tool)} for tool in tools],
            },
            "response": {
                "model": given.get("gen_ai.response.model"),
                "choices": [
                    {"message": chat, "finish_reason": REASONS.get(reason, reason)}
                    for message in output
                    for reason in [message.get("finish_reason")]
                    for chat in _chat_messages(message["role"], message["parts"])
                ],
                "usage": {
                    "prompt_tokens": given.get("gen_ai.usage.input_tokens", 0),
                    "completion_tokens": given.get("gen_ai.usage.output_tokens", 0),
                },
            },
        }


def _chat_messages(role: str, parts: list[Row]) -> list[Row]:
    """Return one message of OpenAI's format, and a separate one for each tool result."""
    results, calls, texts, thoughts = [], [], [], []
    for part in parts:
        match part["type"]:
            case "text":
                texts.append(part["content"])
            case "reasoning":
                thoughts.append(part["content"])
            case "tool_call":
                given = part.get("arguments") or {}
                text = given if isinstance(given, str) else json.dumps(given)
                function = {"name": part["name"], "arguments": text}
                calls.append({"id": part.get("id"), "type": "function", "function": function})
            case "tool_call_response":
                result = part.get("response", part.get("result"))
                text = result if isinstance(result, str) else json.dumps(result)
                results.append({"role": "tool", "tool_call_id": part.get("id"), "content": text})
            case other:
                raise ValueError(f"a part of the type {other} is no text: leave out this chat")
    if results and not texts and not calls:
        return results
    message: Row = {"role": role, "content": "".join(texts) if texts else None}
    message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return [*results, message | ({"tool_calls": calls} if calls else {})]


def _attributes(pairs: list[Row]) -> Row:
    return {pair["key"]: _value(pair["value"]) for pair in pairs}


def _value(given: Row) -> Any:
    if "arrayValue" in given:
        return [_value(each) for each in given["arrayValue"].get("values", ())]
    if "kvlistValue" in given:
        return _attributes(given["kvlistValue"].get("values", ()))
    if "intValue" in given:
        return int(given["intValue"])
    return next(iter(given.values()), None)


def langfuse_rows(exported: list[Row]) -> Iterator[Row]:
    """Yield a row for each generation. A score of a whole trace goes to its last generation."""
    rows = [_snake_keys(inner) for row in exported for inner in _inner_rows(row)]
    generations = [row for row in rows if row.get("type") == "GENERATION" and row.get("output")]
    last = {row["trace_id"]: row["id"] for row in generations}
    scores: dict[str, Row] = {}
    for row in rows:
        if "data_type" in row and isinstance(row.get("value"), int | float):
            name = row.get("observation_id") or last.get(row["trace_id"], "")
            scores.setdefault(name, {})[row["name"]] = row["value"]
    for row in generations:
        asked, answer = _parse_json(row["input"]), _parse_json(row["output"])
        request = asked if isinstance(asked, dict) else {"messages": asked}
        usage = row.get("usage_details") or row.get("usage") or {}
        yield {
            "trace_id": row["trace_id"],
            "request": {**request, "model": row.get("provided_model_name") or row.get("model")},
            "response": {
                "choices": [{"message": {"content": answer} if isinstance(answer, str) else answer}],
                "usage": {
                    "prompt_tokens": usage.get("input", 0),
                    "completion_tokens": usage.get("output", 0),
                },
            },
            "scores": scores.get(row["id"]),
        }


def _inner_rows(row: Row) -> list[Row]:
    """Return the rows of a page of the API, or of a trace with its observations and scores."""
    if "data" in row:
        return [inner for each in row["data"] for inner in _inner_rows(each)]
    if "observations" not in row:
        return [row]
    about = row.get("trace", row)
    own = {"traceId": about["id"]}
    return [{**own, **each} for each in [*row["observations"], *about.get("scores", ())]]


def _snake_keys(row: Row) -> Row:
    return {re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower(): value for key, value in row.items()}


def _parse_json(value: Any) -> Any:
    """Return the value of a field that may be JSON text."""
    is_json = isinstance(value, str) and value[:1] in ("[", "{")
    return json.loads(value) if is_json else value or []


def convert_log(log: Path) -> Iterator[Row]:
    """Yield the rows of a file: one JSON value, or with `.jsonl` one on each line."""
    text = log.read_text(encoding="utf-8")
    rows = [json.loads(text)] if log.suffix == ".json" else [*map(json.loads, text.splitlines())]
    if rows and rows[0].keys() & {"resourceSpans", "resourceLogs"}:
        for row in rows:
            yield from otlp_rows(row)
    else:
        yield from langfuse_rows(rows)


if __name__ == "__main__":
    for row in convert_log(Path(sys.argv[1])):
        print(json.dumps(row, ensure_ascii=False))

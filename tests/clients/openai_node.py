"""The `openai` package of npm, driven by `node/run.mjs`: its features as the tests name them."""

from __future__ import annotations

from tests.clients.drive import Client, Target

CLIENT = Client("openai in JavaScript", "openai", {}, registry="npm")


def _in_javascript(target: Target) -> None:
    raise NotImplementedError(f"node/run.mjs asks {target.base_url}")


for _name, _title, _calls in (
    ("chat", "`chat.completions.create`", 1),
    ("stream", "`chat.completions.stream`", 1),
    ("parse", "`chat.completions.parse` with `zodResponseFormat`", 1),
    ("run_tools", "`chat.completions.runTools`", 2),
    ("responses", "`responses.parse` with `zodTextFormat`", 1),
):
    CLIENT.add(_name, _title, _in_javascript, calls=_calls, extends=_calls > 1)

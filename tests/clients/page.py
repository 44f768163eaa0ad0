"""`docs/compatibility.md`: the clients and what works with them.

    python -m tests.clients.page

writes it anew; clients that are not installed keep what is written of them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from etude.core.call import Call, continues
from tests.clients.drive import MODULES, OPTIONAL, Feature, load_client
from tests.clients.matrix import ROOT, SIDES, Outcome, Outcomes, is_installed, package_file, run_matrix

PAGE = ROOT / "docs" / "compatibility.md"


def render(outcomes: Outcomes) -> str:
    """The page. Its beginning, and the sections of clients that did not run, are those that are written."""
    ran = {module for module, _, _ in outcomes}
    head, *sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    written = {part.partition(" (")[0]: part for part in sections}
    parts = [head]
    for module in (*MODULES, *OPTIONAL):
        parts.append(section(module, outcomes) if module in ran else written[load_client(module).name])
    return "\n## ".join(part.rstrip("\n") + "\n" for part in parts)


def section(module: str, outcomes: Outcomes) -> str:
    """The section of a client."""
    client = load_client(module)
    parts = [f"{client.name} ({_version(module)})\n", "| what | endpoint | server |\n|---|---|---|"]
    for name, feature in client.features.items():
        at = {side: outcomes[module, name, side] for side in SIDES}
        recorded = _recorded(feature, at["endpoint"]) if at["endpoint"].error is None else "no"
        server = "yes" if at["server"].error is None else "no"
        parts.append(f"| {feature.title} | {recorded} | {server} |")
    return "\n".join(parts) + "\n"


def _version(module: str) -> str:
    if module in MODULES:
        return version(load_client(module).package)
    return str(json.loads(package_file(module).read_text(encoding="utf-8"))["version"])


def _recorded(feature: Feature, outcome: Outcome) -> str:
    """The cell for a feature that works, by the calls that the episode recorded."""
    calls = outcome.calls
    recorded = feature.calls > 0 and len(calls) >= feature.calls and all(map(is_recorded, calls))
    extended = recorded and feature.extends and is_extended(calls)
    return ", ".join(["yes", *["recorded"] * recorded, *["extended"] * extended])


def is_recorded(call: Call) -> bool:
    """Whether a call has the token ids and logprobs of its answer."""
    answer = call.completion
    if answer is None or not answer.prompt_ids or not answer.completion_ids or answer.logprobs is None:
        return False
    return len(answer.logprobs) == len(answer.completion_ids)


def is_extended(calls: Sequence[Call]) -> bool:
    """Whether calls go on from earlier ones, and all that do begin with the earlier tokens."""
    pairs = [
        (earlier.completion, later.completion)
        for index, later in enumerate(calls)
        for earlier in calls[:index]
        if continues(later.request.messages, earlier)
    ]
    return bool(pairs) and all(
        earlier is not None
        and later is not None
        and not later.drifted
        and is_prefix((earlier.prompt_ids or ()) + (earlier.completion_ids or ()), later.prompt_ids or ())
        for earlier, later in pairs
    )


def is_prefix(start: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether `ids` begin with `start`."""
    return tuple(ids[: len(start)]) == tuple(start)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        found = tuple(module for module in OPTIONAL if is_installed(module))
        PAGE.write_text(render(run_matrix(Path(made), (*MODULES, *found))), encoding="utf-8")

"""Each promise of docs/promises.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(\.\./(tests/[\w/]+\.py)(?:#(\w+))?\)")


def test_every_promise_is_shown_by_tests_that_there_are():
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    promises, _, _ = page.partition("\n## What became weaker")
    rows = [
        line for line in promises.splitlines() if line.startswith("| ") and not line.startswith("| promise ")
    ]
    assert len(rows) > 20
    for row in rows:
        links = LINK.findall(row)
        assert links, f"no test is named for: {row[:80]}"
        for file, name in links:
            path = ROOT / file
            assert path.is_file(), file
            if name:
                tree = ast.parse(path.read_text(encoding="utf-8"))
                names = {
                    node.name
                    for node in ast.walk(tree)
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                }
                assert name in names, f"{file} has no {name}"

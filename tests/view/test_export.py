"""A run as one file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re

import pytest

from etude.core.errors import RequestError
from etude.view.export import export_run
from tests.view.stored import Told, store_run


def test_the_file_has_the_run_and_needs_nothing_else(runs, tmp_path):
    file = tmp_path / "out.html"
    assert export_run(runs / "first", file) == 6
    text = file.read_text(encoding="utf-8")
    assert "data-chart=" in text and "it is &lt;b&gt;right&lt;/b&gt;" in text and "twelve apples?" in text
    assert not re.search(r'(src|href)="(?!#)', text)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    for part in re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", text, flags=re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in html.unescape(policy[1])
    chunks = [json.loads(html.unescape(each)) for each in re.findall(r'data-inline="([^"]*)"', text)]
    assert chunks and all(chunk[0]["from"] == 0 and chunk[0]["ids"] for chunk in chunks)


def test_it_is_the_same_each_time(runs, tmp_path):
    for name in ("one", "two"):
        export_run(runs / "first", tmp_path / name, count=2)
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()


def test_a_run_without_episodes_has_nothing_to_send(tmp_path):
    with pytest.raises(RequestError, match="no episodes yet"):
        export_run(store_run(tmp_path), tmp_path / "out.html")


def test_what_was_said_cannot_leave_its_place(tmp_path):
    evil = "</script><script>alert(1)</script>\"'><img src=x>"
    told = Told("eval/e/0", ({"role": "assistant", "content": evil},), evil, output=evil)
    file = tmp_path / "out.html"
    export_run(store_run(tmp_path, episodes=[told]), file)
    text = file.read_text(encoding="utf-8")
    assert "alert(1)</script>" not in text and "<img" not in text

"""The command that installs an extra: of what is installed here, wherever it came from."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from etude.core import errors
from etude.core.errors import MissingExtraError


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (
            {"url": "file:///home/me/my%20etude", "dir_info": {"editable": True}},
            "pip install -e '/home/me/my etude[plots]'",
        ),
        ({"url": "file:///src/etude", "dir_info": {}}, "pip install '/src/etude[plots]'"),
        (
            {"url": "file:///tmp/etude-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install '/tmp/etude-0.1.0-py3-none-any.whl[plots]'",
        ),
        (None, "pip install 'etude[plots]'"),
    ],
)
def test_it_names_what_etude_was_installed_from(monkeypatch, origin, command):
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(errors, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert errors.install_command("plots") == command
    assert command in str(MissingExtraError("a picture", "plots"))

"""`package.module:name`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import etude
from etude.config.import_path import import_object, is_import_path, make_importable, where_raised
from etude.core.errors import RequestError


def test_what_a_library_raises_is_said_with_the_users_line():
    """Also what Python's own library raises, and what this package does."""
    for wrong in (lambda: json.loads("{"), lambda: etude.TrainingJobRef(run_id=[], backend="x")):
        with pytest.raises(ValueError) as caught:
            wrong()
        assert re.match(r".*test_import_path\.py:\d+: \w+Error: ", where_raised(caught.value))


@pytest.mark.parametrize(
    ("text", "is_path"),
    [
        ("my_agent:play", True),
        ("agents.maths:Solver.run", True),
        ("ägent:spiel", True),
        ("my_agent", False),
        ("my_agent:", False),
        (":play", False),
        ("my-agent:play", False),
        ("http://localhost:8000", False),
        ("a:b:c", False),
        ("1a:b", False),
        ("", False),
    ],
)
def test_the_form(text: str, is_path: bool):
    assert is_import_path(text) is is_path


def test_modules_are_found_in_the_folders_in_their_order(folder: Path):
    first, second = folder / "first", folder / "second"
    for place in (first, second):
        place.mkdir()
        (place / "etude_test_module.py").write_text(f"here = {place.name!r}\nclass A:\n    b = 7\n")
    make_importable(first, second, first)
    assert sys.path[:2] == [str(first), str(second)]
    assert import_object("etude_test_module:here") == "first"
    assert import_object("etude_test_module:A.b") == 7


def test_the_folders_of_the_config_in_use_come_first_also_for_a_module_that_is_loaded(folder: Path):
    for name in ("first", "second"):
        (folder / name).mkdir()
        (folder / name / "etude_test_agent.py").write_text(f"here = {name!r}\n")
        make_importable(folder / name)
        assert import_object("etude_test_agent:here") == name
        loaded = sys.modules["etude_test_agent"]
        assert import_object("etude_test_agent:here") == name
        assert sys.modules["etude_test_agent"] is loaded


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_agent", r"'my_agent' is not an import path; write package.module:name"),
        (
            "my_agnt:play",
            r"there is no module 'my_agnt' in .* or the installed packages; did you mean 'my_agent'\?",
        ),
        ("my_agent.py:play", r"there is no module 'my_agent.py' in .*; did you mean 'my_agent'\?"),
        ("zzz.y:play", r"there is no module 'zzz' in .* or the installed packages$"),
        ("my_agent:pley", r"has no 'pley'; did you mean 'my_agent:play'\?"),
        ("my_agent:zzz", r"has no 'zzz'$"),
        ("broken:f", r"broken.py:2: ValueError: no$"),
        ("wrong:f", r"wrong.py:1: SyntaxError: "),
        ("needs:f", r"needs.py:1: ModuleNotFoundError: No module named 'zzz'$"),
        ("silent:f", r"silent.py:1: RuntimeError: no message$"),
    ],
)
def test_what_cannot_be_imported_is_explained(folder: Path, path: str, message: str):
    (folder / "broken.py").write_text("\nraise ValueError('no\\nmore')\n")
    (folder / "wrong.py").write_text("def f(:\n")
    (folder / "needs.py").write_text("import zzz\n")
    (folder / "silent.py").write_text("raise RuntimeError\n")
    make_importable(folder)
    with pytest.raises(RequestError, match=message):
        import_object(path)


def test_an_error_of_ours_in_the_users_module_is_told_as_it_is(folder: Path):
    (folder / "agents.py").write_text("from etude import RequestError\nraise RequestError('too long')\n")
    make_importable(folder)
    with pytest.raises(RequestError, match=r"^too long$"):
        import_object("agents:f")


def test_an_error_that_was_never_raised_has_no_place():
    assert where_raised(ValueError("x")) == "ValueError: x"

"""Log records: which are shown, and where."""

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from etude.config.import_path import import_object, make_importable
from etude.show.logs import LogLines


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level
    root.setLevel(level)


def record(file: str, level: int, name: str = "some.name") -> logging.LogRecord:
    return logging.LogRecord(name, level, file, 1, "text", None, None)


INSTALLED = "/venv/lib/python3.11/site-packages/httpx/_client.py"


@pytest.mark.parametrize(
    ("level", "file", "least"),
    [
        (logging.DEBUG, "/home/me/agent.py", logging.DEBUG),
        (logging.INFO, "/home/me/agent.py", logging.INFO),
        (logging.ERROR, "/home/me/agent.py", logging.ERROR),
        (logging.DEBUG, INSTALLED, logging.WARNING),
        (logging.INFO, INSTALLED, logging.WARNING),
        (logging.ERROR, INSTALLED, logging.ERROR),
        (logging.INFO, logging.__file__, logging.WARNING),
        (logging.INFO, sys.modules[LogLines.__module__].__file__, logging.INFO),
    ],
)
def test_user_code_is_shown_from_the_level_on_and_libraries_from_warnings_on(
    level: int, file: str, least: int
) -> None:
    handler = LogLines(level)
    levels = [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL]
    assert [one for one in levels if handler.filter(record(file, one))] == [
        one for one in levels if one >= least
    ]


def test_a_package_that_a_config_names_is_the_users_also_when_it_is_installed(tmp_path: Any) -> None:
    (tmp_path / "my_installed_agent.py").write_text("def play(example, episode): ...\n")
    make_importable(tmp_path)
    made = record(INSTALLED, logging.INFO, "my_installed_agent.tools")
    assert not LogLines(logging.INFO).filter(made)
    import_object("my_installed_agent:play")
    assert LogLines(logging.INFO).filter(made)

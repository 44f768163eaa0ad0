"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from etude.core import secrets
from etude.store.journal import Journal
from tests import forked

pytest_plugins = ["tests.hangs", "tests.leftovers"]

# Tests import ten thousand modules, among which there is nothing to collect.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but not among the modules."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Let the workers share what starts commands."""
    if not hasattr(config, "workerinput"):
        forked.share()


# A busy machine is no failure, of a test or of its inputs.
settings.register_profile(
    "etude", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40
)
settings.register_profile("thorough", settings.get_profile("etude"), max_examples=100)
settings.load_profile("etude")

# A client of HTTP reads 140 certificates when it is made, in 40 ms. Here one is enough.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "certificate.pem")

# The width of the terminal that tests are started from is no width of the programs under test.
os.environ.pop("COLUMNS", None)

# A program that is started in the background may ignore Ctrl-C, and its children inherit that:
# tests that press Ctrl-C on a child would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run whose parts a test may replace."""
    from tests.training import Run  # Here, because most tests train nothing.

    return Run(tmp_path / "run")


@pytest.fixture(autouse=True)
def own_secrets() -> Iterator[None]:
    """A secret of one test, such as "from the environment", is none in the texts of the next."""
    kept, seen = dict(secrets._kept), dict(secrets._seen)
    yield
    for table, before in ((secrets._kept, kept), (secrets._seen, seen)):
        table.clear()
        table.update(before)


@pytest.fixture(scope="session", autouse=True)
def no_plots() -> Iterator[None]:
    """Runs in this process draw nothing, which takes half of a small one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("etude.show.metrics_files.render_reward_plot", lambda history: b"")
        yield


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "run.db") as journal:
        yield journal

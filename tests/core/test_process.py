"""Garbage is collected rarely, and threads that wait spin briefly."""

import gc
import io
import os
import sys

import pytest

from etude.core.process import rare_garbage_collection, set_up_process
from etude.show.progress import progress_for


@pytest.fixture(autouse=True)
def thresholds(monkeypatch: pytest.MonkeyPatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_runs_that_overlap_leave_the_thresholds_as_they_were(thresholds):
    first, second = rare_garbage_collection(), rare_garbage_collection()
    first.__enter__()
    during = gc.get_threshold()
    assert during[0] > 10 * thresholds[0]
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == during
    second.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch, name: str):
    set_up_process()
    assert os.environ.pop("GOMP_SPINCOUNT") == "10000"
    monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    set_up_process()
    assert dict(os.environ) == before


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", rb"\xd7"), ("latin-1", b"\xd7")])
def test_a_letter_that_an_output_lacks_ends_nothing(monkeypatch: pytest.MonkeyPatch, encoding, shown):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, write_through=True))
    set_up_process()
    sys.stdout.write("×")
    assert written.getvalue() == shown


def test_a_program_without_an_output_is_silent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    progress_for().message("for nobody")
    set_up_process()
    sys.stdout.write("nor this")

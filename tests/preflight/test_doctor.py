"""The report on the machine."""

from __future__ import annotations

import re

import pytest

from etude.preflight.doctor import examine

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"


@pytest.mark.parametrize(
    ("value", "status", "detail"),
    [
        ("1", "ok", f"operations that it does not have run on the CPU ({FALLBACK}=1)"),
        ("0", "warning", f"operations that it does not have are errors; to .* CPU: export {FALLBACK}=1"),
    ],
)
def test_on_apples_gpus_it_says_where_missing_operations_run(monkeypatch, tmp_path, value, status, detail):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setenv(FALLBACK, value)
    findings = {each.what: each for each in examine(tmp_path).items}
    assert findings["MPS"].status == status
    assert re.search(detail.replace("(", r"\(").replace(")", r"\)"), findings["MPS"].detail)
    assert findings["torch"].detail.endswith("device mps")


def test_elsewhere_it_says_nothing_of_them(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    assert all(each.what != "MPS" for each in examine(tmp_path).items)

"""A storage is tried before anything is sampled."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.backup.probe import probe
from etude.config.storage import StorageConfig
from etude.core.errors import RequestError
from tests.backup.faulty import Faulty


@pytest.fixture
def faulty() -> Iterator[StorageConfig]:
    Faulty.heal()
    Faulty.released.clear()
    Faulty.store.clear()
    yield StorageConfig(address="faulty://bucket/etude", patience=60)
    Faulty.heal()


async def test_nothing_is_left_of_the_probe(tmp_path: Path, faulty: StorageConfig):
    assert "takes backups" in await probe(StorageConfig(address=f"file://{tmp_path}/storage"))
    assert list((tmp_path / "storage").iterdir()) == []
    assert "takes backups" in await probe(faulty)
    assert Faulty.store == {}


async def test_a_place_that_is_no_folder_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"storage file:///.*/file: an object cannot be written: .*Error"):
        await probe(StorageConfig(address=f"file://{tmp_path}/file"))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"error": FileNotFoundError("no such bucket")}, "no such bucket; make its bucket or folder first"),
        ({"error": PermissionError(errno.EACCES, "denied")}, "denied; give these credentials the right"),
        ({"error": ValueError("no credentials")}, "no credentials; the driver takes its credentials from"),
        ({"tears": True}, "what is read is not what was written"),
        ({"overwrites": True}, "the driver overwrites an object"),
        ({"undeletable": True}, "objects cannot be deleted, and etude-check-[0-9a-f]+ is left there"),
        ({"hangs": True}, "did not answer within 0.1 s"),
    ],
)
async def test_each_fault_has_its_sentence(
    faulty: StorageConfig, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], said: str
):
    for name, value in fault.items():
        setattr(Faulty, name, value)
    pipe_file = Faulty.pipe_file

    def suffering(self: Faulty, *arguments: Any, **options: Any) -> Any:
        self._suffer()
        return pipe_file(self, *arguments, **options)

    monkeypatch.setattr(Faulty, "pipe_file", suffering)
    patience = 0.1 if "hangs" in fault else faulty.patience
    with pytest.raises(RequestError, match=said):
        await probe(faulty.model_copy(update={"patience": patience}))

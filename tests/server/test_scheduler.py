"""The scheduler of a server's jobs, without the server."""

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from etude.server.database import FILES, open_database
from etude.server.files import FileStore
from etude.server.jobs import JobStore
from etude.server.models import ModelStore
from etude.server.scheduler import Scheduler
from etude.server.settings import ServerSettings
from tests.support import until


async def test_a_job_whose_folder_cannot_be_made_is_not_tried_again_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database, unused = open_database(tmp_path / "server.db"), Any
    jobs, models = JobStore(database), ModelStore(database, tmp_path, "tiny")
    files = FileStore(database, tmp_path, unused)
    row = {"id": "file-1", "created": 0.0, "filename": "a", "bytes": 1, "method": "supervised", "rows": 1}
    with database.begin() as connection:
        connection.execute(sa.insert(FILES).values(row))
    asked = {"model": "tiny", "method": "supervised", "training_file": "file-1", "seed": 1, "metadata": {}}
    job, _ = jobs.create({**asked, "hyperparameters": {}, "request_hash": "", "idempotency_key": None})
    (tmp_path / "jobs").write_text("")
    scheduler = Scheduler(ServerSettings(model="tiny", data_dir=tmp_path), jobs, files, models, unused)
    scheduler.start()
    await until(lambda: bool(caplog.records))
    await scheduler.stop()
    assert jobs.get(job["id"])["status"] == "running"
    assert sum(job["id"] in record.getMessage() for record in caplog.records) == 1

"""The configs of the data sets of code validation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from etude.config.component import DatasetConfig

APPS = "codeparrot/apps"
BUGGY_APPS = "lrhammond/buggy-apps"


class ProgramsConfig(DatasetConfig):
    """Keys that both data sets share."""

    file_path: Path | None = Field(
        default=None, description="A JSON Lines, JSON or Parquet file in place of the hub."
    )
    path: str = Field(default=APPS, description="Name on the hub, or a folder. Needs the extra `data`.")
    subset: str | None = Field(default=None, description="The dataset's configuration, where it has several.")
    revision: str | None = Field(default=None, description="Version on the hub.")
    split: str | None = Field(
        default=None,
        description="`train` or `test`. Of a file: the rows with this `apps_split`; by default all. Of the "
        "hub: by default `train`.",
    )
    difficulty: Literal["introductory", "interview", "competition"] | None = Field(
        default=None, description="Only problems of this difficulty."
    )
    exclude_flagged: bool = Field(
        default=True, description="Leave out problems that were flagged, where the data has flags."
    )
    solution_number: int | None = Field(
        default=None, ge=0, description="Only the solution of this number of each problem, from 0."
    )
    limit: int | None = Field(default=None, ge=1, description="Use at most this many programs.")
    shuffle: bool = Field(default=False, description="Shuffle the programs, before `limit` is applied.")
    seed: int = Field(default=0, ge=0, description="Seed of the shuffling.")


class AppsConfig(ProgramsConfig, name="apps"):
    """Programs of APPS, all of them right; by default the first of each problem."""

    solution_number: int | None = Field(
        default=0, ge=0, description="Only the solution of this number of each problem; null for all."
    )


class BuggyAppsConfig(ProgramsConfig, name="buggy_apps"):
    """Right programs and wrong ones, in the columns of `lrhammond/buggy-apps`."""

    path: str = Field(default=BUGGY_APPS, description="Name on the hub, or a folder. Needs the extra `data`.")

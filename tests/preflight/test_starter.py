"""Projects for environments, and what an environment needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from etude.config import registry
from etude.config.component import WorkflowConfig
from etude.config.load import load_config, parse_config
from etude.config.registry import register_workflow
from etude.config.supplies import Need, Starter, Supplies, package_need
from etude.core.errors import install_command
from etude.preflight.check import check_config
from etude.preflight.starter import write_environment


class MazeConfig(WorkflowConfig, name="maze"):
    """An environment that is not installed."""

    size: int = 4

    def supplies(self) -> Supplies:
        """Seeds and a reward."""
        seeds = {"_type": "seeds", "size": 4}
        return Supplies(dataset=seeds, evaluators={"reward": {"_type": "measured"}})

    def needs(self) -> list[Need]:
        """One thing that is there and one that is not."""
        return [package_need("json", "maze"), package_need("no_such_maze", "maze")]

    @classmethod
    def starter(cls, task: str | None) -> Starter:
        """A maze of a size."""
        blocks = {"workflow": {"_type": "maze", "size": int(task or 4)}, "finetuning": {"num_epochs": 3}}
        return Starter(blocks, {"walls.txt": "#"}, models=("runner", "builder"))


@pytest.fixture(autouse=True)
def maze() -> Iterator[None]:
    registry.load_entry_points()
    before = dict(registry._registrations)

    @register_workflow(config_type=MazeConfig)
    async def build(config: Any, builder: Any) -> Any:
        yield config

    yield
    registry._registrations.clear()
    registry._registrations.update(before)


def test_a_project_has_the_environments_blocks_over_the_usual_ones(tmp_path):
    written = write_environment(tmp_path / "new", "maze:7", "base")
    assert sorted(path.name for path in written) == ["config.yml", "walls.txt"]
    config = load_config(tmp_path / "new" / "config.yml")
    assert (config.workflow.size, config.finetuning.num_epochs, config.finetuning.enabled) == (7, 3, True)
    assert [*config.llms] == [*config.finetuning.targets] == ["runner", "builder"]


async def test_a_check_says_what_is_missing_before_anything_is_built():
    config = parse_config({"workflow": {"_type": "maze"}})
    findings = [each for each in (await check_config(config)).findings.items if each.what == "needs"]
    assert [(each.status, each.detail) for each in findings] == [
        ("ok", "the package json"),
        ("error", f"the package no_such_maze is not there; {install_command('maze')}"),
    ]

"""Weights & Biases: one run of a project, online or offline, whose id is the token of the journal.

The step of W&B counts records, and charts have `epoch` as their axis. W&B drops a step that it has already.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.registry import register_tracker
from etude.trackers.record import (
    SECONDS_TO_ANSWER,
    RunRecord,
    State,
    TrackedRun,
    require_package,
    require_server,
)


class WandbConfig(TrackerConfig, name="wandb"):
    """A run of Weights & Biases. `wandb login` or WANDB_API_KEY says whose."""

    project: str = "etude"
    """Its project, which is made where there is none; its owner is the account's, or WANDB_ENTITY."""
    mode: Literal["online", "offline"] | None = None
    """`offline` keeps it in the run folder, for `wandb sync`; left out: as WANDB_MODE says, or online."""

    def destination(self) -> str:
        return f"project {self.project}" + (", offline" if self.mode == "offline" else "")


class WandbTracker:
    """Logs the records of a run."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._run: Any = None

    def open(self, run: TrackedRun) -> str:
        """Begin the run, or go on with it. Raises EtudeError where there is no server."""
        import wandb

        self.close("stopped")
        config, settings = self._config, wandb.setup().settings
        if (config.mode or settings.mode) == "online":
            # It tries for a minute itself, and no program ends meanwhile.
            require_server(settings.base_url)
        self._run = wandb.init(
            project=config.project,
            id=run.token,
            name=run.name,
            resume="allow",
            mode=config.mode,
            dir=str(run.folder),
            config={**run.config, "code": run.code},
            allow_val_change=True,
            # A run of the user's own, in the same process, is left as it is.
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=max(config.patience, SECONDS_TO_ANSWER),
                finish_timeout=config.patience or 1.0,
            ),
        )
        self._run.define_metric("epoch")
        self._run.define_metric("*", step_metric="epoch")
        if self._run.offline:
            return f"wandb sync {run.folder / 'wandb' / f'offline-run-*-{run.token}'}"
        return str(self._run.url or "")

    def send(self, record: RunRecord) -> None:
        """Log its metrics and alarms as one step."""
        import wandb

        data = {**record.logged(wandb), "epoch": record.step}
        self._run.log(data, step=record.number, commit=True)

    def close(self, state: State) -> None:
        """Finish the run as far as this process goes, once all of it is uploaded or on the disk."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=int(state != "finished"))


@register_tracker(config_type=WandbConfig)
async def wandb(config: WandbConfig, builder: Builder) -> AsyncIterator[WandbTracker]:
    """Raises MissingExtraError."""
    require_package("wandb", "wandb")
    yield WandbTracker(config)

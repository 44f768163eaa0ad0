"""The live display of a run on a terminal, and which display suits where the output goes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from etude.report.lines import (
    JsonProgress,
    LineProgress,
    RunState,
    shown_time,
    shown_validation,
)
from etude.store.figures import shown_reward

_LEAST, _MOST = 20, 100
"""Columns of the panel."""

_KEYS = 8
"""Columns that stay free at its right."""


class LiveProgress(RunState):
    """A panel that is drawn over itself. Use it as a context manager; messages scroll by above it."""

    def __init__(self, console: Console | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._console = console or Console()
        self._live = Live(
            console=self._console, get_renderable=self.render, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def skipped(self, epoch: int, reason: str) -> None:
        super().skipped(epoch, reason)
        self.message(f"epoch {epoch} skipped: {self.skip_reason}", warning=True)

    def validated(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        super().validated(epoch, metrics)
        self.message(shown_validation(epoch, metrics))

    def message(self, text: str, *, warning: bool = False) -> None:
        self._console.print(Text(text, style="yellow" if warning else "dim"))

    def render(self) -> RenderableType:
        """The panel as it is now."""
        rows = Table.grid(expand=True)
        rows.add_row(self._headline())
        if self.phase_total:
            rows.add_row(ProgressBar(total=self.phase_total, completed=self.episodes))
        rows.add_row(self._rewards())
        if self.spending:
            rows.add_row(Text.assemble("spent ", (self.spending, "bold")))
        for target, validations in self.validations.items():
            rows.add_row(self._validations(target, validations))
        title = Text.assemble(("etude", "bold"), f" · {self.run_id}" if self.run_id else "")
        return Panel(
            rows,
            title=title,
            title_align="left",
            border_style="blue",
            # Room for what a terminal writes when keys are pressed: `^C` after a full line begins a new one,
            # and the panel would then be taken away a line too low.
            width=max(_LEAST, min(self._console.width - _KEYS, _MOST)),
        )

    def _headline(self) -> Table:
        row = Table.grid(expand=True)
        row.add_column()
        row.add_column(justify="right")
        left = Text.assemble((self.phase_name, "bold cyan"))
        if self.epoch is not None:
            left.append(f"  epoch {self.epoch}/{self.num_epochs}")
        if self.phase_total:
            left.append(f"  {self.episodes}/{self.phase_total} episodes")
        right = Text()
        for count, name in ((self.skips, "skipped"), (self.failures, "failed")):
            right.append(f"{count} {name} · " if count else "", style="yellow")
        right.append(f"{self.tokens_per_second:,.0f} tokens/s · " if self.tokens else "", style="dim")
        right.append(shown_time(self.elapsed), style="dim")
        row.add_row(left, right)
        return row

    def _rewards(self) -> Text:
        reward = self.reward_so_far
        text = Text.assemble("reward ", ("–" if reward is None else f"{reward:.3f}", "bold green"))
        for target, rewards in self.rewards.items():
            text.append(f"  {target or 'last epoch'} {rewards[-1]:.3f}", style="green")
        return text

    def _validations(self, target: str, validations: Sequence[Mapping[str, Any]]) -> Text:
        first, last = validations[0], validations[-1]
        text = shown_reward(last) if first is last else f"{shown_reward(first)} → {shown_reward(last)}"
        return Text.assemble("validation ", f"{target} " if target else "", (text, "bold magenta"))


def progress_for(
    *, json: bool = False, stream: TextIO | None = None
) -> LiveProgress | LineProgress | JsonProgress:
    """A progress display, to be used as a context manager.

    JSON lines when asked for, a live panel on a terminal, plain lines with the time into anything else.
    `stream` is standard output by default.
    """
    stream = stream or sys.stdout
    if json:
        return JsonProgress(stream)
    if not stream.isatty():
        return LineProgress(stream, stamped=True)
    return LiveProgress(Console(file=stream))

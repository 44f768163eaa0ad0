"""`etude cluster …`: a run on several machines, looked at and steered while it goes on."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, OutputDir, argument, option, reported
from etude.cli.console import emit, next_step, say, say_wrapped, table

if TYPE_CHECKING:
    from etude.store.addresses import AddressRow

app = typer.Typer(
    help="Steer and look at a run on several machines.", no_args_is_help=True, rich_markup_mode=None
)

RunOption = Annotated[str, option("A run folder, or a run's name in --output-dir.", "--run")]


@app.command()
@reported
def drain(
    address: Annotated[str, argument("One of a model's several addresses, as `base_url` has it.")],
    run: RunOption,
    undo: Annotated[bool, option("Use the address again.", "--undo")] = False,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Take an address out of a run, or back: no conversation begins there, and those that it has finish."""
    from etude.store.addresses import take_back, take_out
    from etude.store.facts import find_run

    path, url = find_run(run, output_dir), address.strip().rstrip("/")
    (take_back if undo else take_out)(path, url)
    if as_json:
        emit({"run": str(path), "address": url, "taken_out": not undo})
        return
    if undo:
        say_wrapped(f"{url} gets conversations again")
    else:
        say_wrapped(f"no conversation begins at {url} any more; once it is drained, it can be stopped")
    next_step(hints.addresses(path))


@app.command()
@reported
def addresses(run: RunOption, output_dir: OutputDir = RUNS, as_json: AsJson = False) -> None:
    """Show how the addresses of a run's models are: as they were a second ago, or when the run ended."""
    from etude.store.addresses import read_orders, read_report
    from etude.store.facts import find_run

    path = find_run(run, output_dir)
    report, out = read_report(path), sorted(read_orders(path))
    if as_json:
        rows = {name: {url: asdict(row) for url, row in each.items()} for name, each in report.items()}
        emit({"run": str(path), "models": rows, "taken_out": out})
        return
    if not report:
        say(f"no model of {path.name} has several addresses")
    show_addresses(report)
    drained = [url for rows in report.values() for url, row in rows.items() if row.state == "drained"]
    next_step(hints.take_back(path, drained[0]) if drained else hints.show(path))


def show_addresses(report: dict[str, dict[str, AddressRow]]) -> None:
    """A table of the addresses of models, with how each is."""
    rows = [
        (name, url, row.shown, row.conversations, row.calls, row.answered, row.failed)
        for name, each in report.items()
        for url, row in each.items()
    ]
    if rows:
        table(("model", "address", "state", "conversations", "calls", "answered", "failed"), rows)

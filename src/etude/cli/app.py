"""The program's commands. Nothing slow is imported here: each command imports the modules it needs."""

import importlib.metadata
import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from etude.cli import episodes, first_steps, runs, serve, train
from etude.cli.command import option, report_errors
from etude.cli.console import INVOCATION
from etude.show.logs import show_logs

_HELP = """Etude fine-tunes the models inside LLM agents from the agents' own runs.

New here: `etude demo` trains a small agent, in half a minute on two idle cores. Then `etude init my_agent`.
"""


class Commands(TyperGroup):
    """A group that accepts `--debug` anywhere on the line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the program's own arguments. Each command parses its own later."""
        end = args.index("--") if "--" in args else len(args)
        INVOCATION.folder, INVOCATION.debug = None, "--debug" in args[:end]
        with suppress(FileNotFoundError):
            INVOCATION.folder = Path.cwd()
        if not INVOCATION.debug:
            # Future changes in libraries do not concern a user who trains an agent.
            warnings.simplefilter("ignore", FutureWarning)
        words = [word for index, word in enumerate(args) if word != "--debug" or index >= end]
        return list(super().parse_args(ctx, words))


app = typer.Typer(
    cls=Commands,
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"etude {importlib.metadata.version('etude')}")
        raise typer.Exit


@app.callback()
def etude(
    version: Annotated[
        bool, option("Show the version.", "--version", is_eager=True, callback=_show_version)
    ] = False,
    debug: Annotated[
        bool, option("Show tracebacks, and all log lines; anywhere on the line.", "--debug")
    ] = False,
) -> None:
    """Set the options of the program itself."""
    show_logs(logging.DEBUG if INVOCATION.debug else logging.INFO)


_COMMANDS: tuple[Callable[..., None], ...] = (
    *(first_steps.init, first_steps.demo, first_steps.check, first_steps.doctor, train.train, train.resume),
    *(train.evaluate, episodes.episodes, runs.jobs, train.export, episodes.import_traces),
    *(serve.serve, runs.view, first_steps.skill),
)
for _command in _COMMANDS:
    app.command()(report_errors(_command))
app.add_typer(runs.app, name="runs")
app.add_typer(runs.cluster_app, name="cluster")

"""Parts that all commands share: options, work that can be stopped, and errors with exit codes."""

import errno
import functools
import json
import shlex
import signal
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeAlias, TypeVar

import typer

from etude.cli.console import INVOCATION, emit, warn
from etude.config.import_path import where_raised
from etude.core.errors import BudgetReached, ErrorBudgetExceeded, EtudeError, LoopStopped, RequestError

P = ParamSpec("P")
T = TypeVar("T")


def argument(help: str, **settings: Any) -> Any:
    """Declare an argument of a command."""
    return typer.Argument(help=help, show_default=False, **settings)


def option(help: str, *names: str, **settings: Any) -> Any:
    """Declare an option of a command. Without `names`, it is called like its parameter."""
    return typer.Option(*names, help=help, **settings)


ConfigFile: TypeAlias = Annotated[Path, argument("The config file.")]
Run: TypeAlias = Annotated[str, argument("A run folder, or a run's name in --output-dir.")]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    option(
        "Set a key of the config: -o finetuning.num_epochs=5. Repeatable.",
        "--override",
        "-o",
        metavar="KEY=VALUE",
        show_default=False,
    ),
]
OnCluster: TypeAlias = Annotated[
    str | None,
    option(
        "Play the episodes on a Ray cluster: auto, or the HOST:PORT of its head.", "--on", metavar="ADDRESS"
    ),
]
AsJson: TypeAlias = Annotated[bool, option("Write JSON, for machines.", "--json")]
OutputDir: TypeAlias = Annotated[
    Path, option("The folder where runs are found by name.", "--output-dir", show_default=True)
]

RUNS = Path("runs")
"""The default folder of runs."""
RunsFolder: TypeAlias = Annotated[
    Path | None,
    option(f"Where runs are kept; by default the config's folder for them, or {RUNS}.", "--output-dir"),
]

FAILED, INTERRUPTED, TERMINATED = 1, 130, 143
"""Exit codes. A wrong request has 2, and a run that reached its budget has 3. Shells report the last two for
a process that a signal ended."""

STOPPED = "stopped; everything up to here is kept"


class Terminated(KeyboardInterrupt):
    """A request to end the process (SIGTERM), which then ends as after Ctrl-C."""


def report_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Make a command report any error as a sentence on standard error.

    With `--json` the error also goes to standard output, as an object with `event`, `type`, `error` and
    `exit_code`. The lines that `on_error` added come last.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt as stop:
            code = TERMINATED if isinstance(stop, Terminated) else INTERRUPTED
            raise _report(stop, STOPPED, code, kwargs) from stop
        except BudgetReached as limit:
            raise _report(limit, f"{STOPPED}\n{limit}", limit.exit_code, kwargs) from limit
        except EtudeError as error:
            raise _report(error, f"error: {error}", error.exit_code, kwargs) from error
        except Exception as error:
            # Users get a sentence for unforeseen errors too.
            raise _report(error, f"error: {_unforeseen(error)}", FAILED, kwargs) from error

    return run


@contextmanager
def on_error(hint: Callable[[], str]) -> Iterator[None]:
    """Add the next command to errors from the block, except to a RequestError."""
    try:
        yield
    except RequestError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, ErrorBudgetExceeded):
            error.add_note("the budget is raised with: -o finetuning.error_budget=…")
        changes = f" -o {shlex.quote(error.override)}" if isinstance(error, BudgetReached) else ""
        error.add_note(f"next: {hint()}{changes}")
        raise


def _report(error: BaseException, sentence: str, code: int, options: Mapping[str, Any]) -> typer.Exit:
    """Print the error of a command that had these options, and return the exit for it."""
    if INVOCATION.debug:
        traceback.print_exception(error)
    if options.get("as_json"):
        emit({"event": "error", "type": type(error).__name__, "error": str(error), "exit_code": code})
    warn("\n".join([sentence, *getattr(error, "__notes__", ())]))
    return typer.Exit(code)


def _unforeseen(error: Exception) -> str:
    kind, text = type(error).__name__, str(error).strip()
    first = text.splitlines()[0] if text else "no message"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full ({error}); free some space and try again"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or kind}: {error.strerror}"
    if kind == "OutOfMemoryError" or isinstance(error, MemoryError):
        return f"out of memory ({first}); lower token_budget or max_concurrency, or train with lora"
    return f"{where_raised(error)}; add --debug to see how it came to that"


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result.

    Ctrl-C and SIGTERM cancel it, so that it can clean up. Then KeyboardInterrupt or Terminated is raised. A
    second Ctrl-C waits for nothing. Raises LoopStopped if something else cancelled the work.
    """
    import asyncio  # Imported here so that `etude --help` does not wait for it.

    from etude.core.threads import run_loop

    terminated = False

    async def main() -> T:
        task = asyncio.current_task()

        def end() -> None:
            nonlocal terminated
            terminated = True
            if task is not None:
                task.cancel()

        with suppress(NotImplementedError, RuntimeError):  # Windows and threads have no such signals.
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        return await work

    try:
        return run_loop(main())
    except LoopStopped:
        if terminated:
            raise Terminated from None
        raise


def refuse(reason: str, **options: object) -> None:
    """Raise RequestError for the first of these options that is given."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise RequestError(f"--{name.replace('_', '-')} has no meaning with {reason}")


def on_cluster(address: str | None) -> list[str]:
    """Return overrides of the `cluster` block for the address after `--on`."""
    return [] if address is None else ["cluster._type=ray", f"cluster.address={address}"]


def run_configuration(**settings: Any) -> list[str]:
    """Return overrides of keys in `finetuning.run_configuration` for the settings that are given.

    Files are looked up in the current folder first, as usual on a command line.
    """
    overrides = []
    for key, value in settings.items():
        if isinstance(value, Path):
            value = str(value.absolute() if value.exists() else value)
        if value is not None:
            text = json.dumps(value, ensure_ascii=False)
            overrides.append(f"finetuning.run_configuration.{key}={text}")
    return overrides

"""`etude dataset buggify`: wrong programs, made from right ones."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from etude.cli import hints
from etude.cli.command import AsJson, argument, option, reported, run_async, then
from etude.cli.console import emit, path_shown, say, table, warn

if TYPE_CHECKING:
    from etude.core.interfaces import Engine
    from etude.scenarios.buggify import Buggified

app = typer.Typer(help="Make data sets.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def dataset() -> None:
    """Keeps `buggify` a command of its own, though it is the only one."""


@app.command()
@reported
def buggify(
    source: Annotated[
        str,
        argument(
            "Right programs with tests, in the columns of codeparrot/apps: a .jsonl, .json or .parquet "
            "file, or a name on the hub."
        ),
    ],
    out: Annotated[Path, option("The .jsonl file to write.", show_default=False)],
    model: Annotated[str, option("The model that plants the bugs.", show_default=False)],
    base_url: Annotated[str | None, option("Its endpoint; by default OPENAI_BASE_URL, else OpenAI.")] = None,
    limit: Annotated[int | None, option("Use the first problems only.", min=1)] = None,
    split: Annotated[str | None, option("Problems of this split: train or test.")] = None,
    difficulty: Annotated[
        Literal["introductory", "interview", "competition"] | None, option("Problems of this difficulty.")
    ] = None,
    share: Annotated[float, option("Share of a problem's right programs to make wrong.", min=0, max=1)] = 1.0,
    per_problem: Annotated[int, option("Most wrong programs for one problem.", min=1)] = 1,
    attempts: Annotated[int, option("Answers of the model for one program.", min=1)] = 10,
    temperature: Annotated[float, option("Sampling temperature.", min=0)] = 1.0,
    concurrency: Annotated[int, option("Problems at the same time.", min=1)] = 8,
    seed: Annotated[int, option("Seed of every random choice.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Have a model plant a bug in right programs; each is tried out in a sandbox.

    A wrong program runs, passes some of its tests and fails others. What was paid for is kept beside the
    file: the same command goes on where it was stopped. The key is that of OPENAI_API_KEY.
    """
    from etude.inference.openai_compatible import OpenAiEngine
    from etude.inference.openai_config import OpenAiLlmConfig
    from etude.scenarios.buggify import BuggifySettings, buggify_file, programs_config, work_folder

    settings = BuggifySettings(model, share, per_problem, attempts, temperature, seed=seed)
    config = programs_config(source, split=split, difficulty=difficulty)
    engine = OpenAiEngine(
        OpenAiLlmConfig(model_name=model, base_url=base_url, logprobs=False, request_timeout=300)
    )

    work = buggify_file(
        config, out, engine, settings, limit=limit, max_concurrency=concurrency, on_progress=_show_progress
    )
    with then(hints.again, kept=f"what was paid for is kept in {path_shown(work_folder(out))}"):
        result = run_async(_then_close(work, engine))
    _show(result, out, as_json)


async def _then_close(work: Awaitable[Buggified], engine: Engine) -> Buggified:
    try:
        return await work
    finally:
        await engine.close()


def _show_progress(done: int, of: int, made: int) -> None:
    if done == of or done * 20 // of > (done - 1) * 20 // of:
        warn(f"{done} of {of} problems, {made} with a wrong program")


def _show(result: Buggified, out: Path, as_json: bool) -> None:
    if as_json:
        facts = {"file": str(out.absolute()), "problems": len(result.rows)}
        emit({**facts, "attempts": result.attempts, "left_out": dict(result.left_out)})
        return
    if result.left_out:
        table(("left out because", "problems"), sorted(result.left_out.items()))
    say(f"wrote           {len(result.rows)} problems to {path_shown(out)}")
    say(f"attempts        {result.attempts}")
    quoted = json.dumps(path_shown(out), ensure_ascii=False)
    say(f"in a config     dataset: {{_type: buggy_apps, file_path: {quoted}}}")

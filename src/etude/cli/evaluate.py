"""`etude evaluate CONFIG`: score the agent, with intervals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from etude.cli import hints
from etude.cli.command import (
    RUNS,
    AsJson,
    OnCluster,
    Overrides,
    RunsFolder,
    argument,
    on_cluster,
    on_error,
    option,
    refuse,
    run_async,
    run_configuration,
)
from etude.cli.console import emit, next_step, say, show_troubles, shown_path, table, warn
from etude.core.errors import RequestError

if TYPE_CHECKING:
    from etude.config.schema import Config
    from etude.loop.evaluation import Evaluation
    from etude.store.run_folder import RunFolder
    from etude.store.stored_config import EvaluationRequest


def evaluate(
    config: Annotated[
        Path | None, argument("The config file; with --rescore by default the run's own.")
    ] = None,
    model: Annotated[
        str | None, option("In place of the config's model: a folder, a name, or RUN[:v3|:best|:last|:base].")
    ] = None,
    repeat: Annotated[int, option("Episodes for each example.", min=1, max=10_000)] = 1,
    greedy: Annotated[bool, option("Sample at temperature 0.", "--greedy")] = False,
    dataset: Annotated[
        Path | None,
        option("Evaluate on this file; by default the held-out examples, else the training ones."),
    ] = None,
    rescore: Annotated[
        str | None, option("Score the stored episodes of RUN; no agent is run.", metavar="RUN")
    ] = None,
    phase: Annotated[
        str | None, option("With --rescore: which episodes, such as validation/5; by default the latest.")
    ] = None,
    override: Overrides = None,
    on: OnCluster = None,
    name: Annotated[str | None, option("Name of the run; chosen by default.")] = None,
    output_dir: RunsFolder = None,
    as_json: AsJson = False,
) -> None:
    """Run the agent on examples and score it, with the code that training uses."""
    from etude.config.load import load_config
    from etude.loop.lifecycle import new_run
    from etude.store.facts import find_run
    from etude.store.run_folder import CONFIG
    from etude.store.stored_config import stored_text
    from etude.verbs import request_for

    if rescore is not None:
        given = {"repeat": repeat > 1, "on": on, "model": model, "dataset": dataset}
        refuse("--rescore, which runs no agent", **given, name=name, greedy=greedy)
        settings = None if config is None else load_config(config, override or ())
        run = find_run(rescore, output_dir or (settings.finetuning.output_dir if settings else RUNS))
        if settings is None and (text := stored_text(run)) is None:  # For example an imported log.
            raise RequestError(
                f"run {run.name} has no config of its own; name one whose evaluators are to score it: etude "
                f"evaluate config.yml --rescore {run.name}"
            )
        settings = settings or load_config(run / CONFIG, override or (), text=text)
        _rescore(run, settings, phase, as_json=as_json)
        return
    if config is None:
        raise RequestError("name the config file: etude evaluate config.yml")
    if phase is not None:
        raise RequestError("--phase goes with --rescore RUN")
    overrides = [*(override or ()), *on_cluster(on), *run_configuration(dataset=dataset)]
    settings, request, version = request_for(
        config, overrides, model, output_dir, repeat=repeat, greedy=greedy
    )
    if version is not None and version.choice:
        warn(f"model {version}: {version.choice}")
    with new_run(settings, name, request) as folder:
        evaluate_and_show(settings, folder, request, as_json=as_json)


def evaluate_and_show(settings: Config, run: RunFolder, request: EvaluationRequest, *, as_json: bool) -> None:
    """Evaluate in an open run folder and show the scores. With `as_json`, progress goes to standard error."""
    from etude.show.progress import progress_for
    from etude.verbs import evaluate_in as evaluate_run

    with (
        on_error(lambda: hints.command("resume", run.path)),
        progress_for(stream=sys.stderr if as_json else None) as progress,
    ):
        evaluation = run_async(evaluate_run(settings, run, request, progress=progress))
    _show(evaluation, {"run": str(run.path)}, as_json=as_json)
    if not as_json:
        say(f"run             {shown_path(run.path)}")
        next_step(hints.command("evaluate", "--rescore", run.path))


def _rescore(run: Path, settings: Config, phase: str | None, *, as_json: bool) -> None:
    """Score the stored episodes of a run with the evaluators of a config."""
    from etude.loop.evaluation import rescore_run
    from etude.show.progress import progress_for
    from etude.store.run_folder import RunFolder

    with (
        RunFolder.open(run) as folder,
        on_error(lambda: hints.command("evaluate", "--rescore", run)),
        progress_for(stream=sys.stderr if as_json else None) as progress,
    ):
        scored, evaluation = run_async(rescore_run(settings, folder, phase=phase, progress=progress))
    _show(evaluation, {"run": str(run), "phase": scored}, as_json=as_json)
    if not as_json:
        next_step(hints.show(run))


def _show(evaluation: Evaluation, facts: dict[str, Any], *, as_json: bool) -> None:
    """Print the scores as a table, or as a JSON object."""
    from etude.core.history import Score
    from etude.loop.evaluation import item_rows

    if as_json:
        emit({**facts, **evaluation.as_json(), "items": item_rows(evaluation.output)})
        return
    rows = []
    for name, scores in evaluation.scores().items():
        label = f"{name} (reward)" if name == evaluation.reward else name
        rows.append((label, Score.model_validate(scores).with_count, scores["scored"], scores["unscored"]))
    how = "greedy" if evaluation.greedy else "sampled"
    title = f"{evaluation.model}, {how}, {evaluation.repeat} × {evaluation.examples} examples"
    table(("evaluator", "mean, 95 % interval, examples", "scored", "unscored"), rows, title=title)
    show_troubles(Path(facts["run"]), evaluation.output.calls, evaluation.output.causes)

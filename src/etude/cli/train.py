"""`etude train CONFIG`, `etude evaluate CONFIG`, and `etude resume [RUN]`: go on with what was stopped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from etude.cli import hints
from etude.cli.command import (
    RUNS,
    AsJson,
    ConfigFile,
    OnCluster,
    OutputDir,
    Overrides,
    argument,
    on_cluster,
    option,
    refuse,
    run_async,
    run_configuration,
    then,
)
from etude.cli.console import (
    emit,
    next_step,
    path_shown,
    say,
    say_wrapped,
    show_outcome,
    show_troubles,
    table,
    typed_words,
    warn,
)
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
    repeat: Annotated[int, option("Episodes for each example.", min=1)] = 1,
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
    name: Annotated[str | None, option("Name of the run; made up by default.")] = None,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Run the agent on examples and score it, with the same code as in training."""
    from etude.config.load import load_config
    from etude.loop.lifecycle import new_run
    from etude.store.facts import find_run
    from etude.store.stored_config import CONFIG
    from etude.verbs import request_of

    if rescore is not None:
        refuse("--rescore, which runs no agent", model=model, dataset=dataset, name=name, greedy=greedy)
        run = find_run(rescore, output_dir)
        if config is None and not (run / CONFIG).is_file():  # Such as of a log that was imported.
            raise RequestError(
                f"run {run.name} has no config of its own; name one whose evaluators are to score it: etude "
                f"evaluate config.yml --rescore {run.name}"
            )
        _rescore(run, load_config(config or run / CONFIG, override or ()), phase, as_json=as_json)
        return
    if config is None:
        raise RequestError("name the config file: etude evaluate config.yml")
    if phase is not None:
        raise RequestError("--phase goes with --rescore RUN")
    overrides = [*(override or ()), *on_cluster(on)]
    if dataset is not None:
        overrides += run_configuration(dataset=dataset)
    settings, request, version = request_of(
        config, overrides, model, output_dir, repeat=repeat, greedy=greedy
    )
    if version is not None and version.choice:
        warn(f"model {version}: {version.choice}")
    with new_run(settings, name, request) as folder:
        evaluate_in(settings, folder, request, as_json=as_json)


def evaluate_in(settings: Config, run: RunFolder, request: EvaluationRequest, *, as_json: bool) -> None:
    """Evaluate in an open run folder, and show the scores; progress is told beside the JSON object."""
    from etude.report.progress import progress_for
    from etude.verbs import evaluate_in as evaluate_run

    with (
        then(lambda: hints.resume(run.path)),
        progress_for(stream=sys.stderr if as_json else None) as progress,
    ):
        evaluation = run_async(evaluate_run(settings, run, request, progress=progress))
    _show(evaluation, {"run": str(run.path)}, as_json=as_json)
    if not as_json:
        say(f"run             {path_shown(run.path)}")
        next_step(hints.command("evaluate", "--rescore", run.path))


def _rescore(run: Path, settings: Config, phase: str | None, *, as_json: bool) -> None:
    """Score the stored episodes of a run with the evaluators of a config."""
    from etude.loop.evaluation import rescore_run
    from etude.report.progress import progress_for
    from etude.store.run_folder import RunFolder

    with (
        RunFolder.open(run) as folder,
        then(lambda: hints.command(*typed_words())),
        progress_for(stream=sys.stderr if as_json else None) as progress,
    ):
        scored, evaluation = run_async(rescore_run(settings, folder, phase=phase, progress=progress))
    _show(evaluation, {"run": str(run), "phase": scored}, as_json=as_json)
    if not as_json:
        next_step(hints.show(run))


def _show(evaluation: Evaluation, facts: dict[str, Any], *, as_json: bool) -> None:
    """The scores as a table, or as a JSON object."""
    from etude.loop.evaluation import item_rows
    from etude.store.figures import shown_score

    if as_json:
        emit({**facts, **evaluation.as_json(), "items": item_rows(evaluation.output)})
        return
    rows = []
    for name, scores in evaluation.scores().items():
        label = f"{name} (reward)" if name == evaluation.reward else name
        rows.append((label, shown_score(scores), scores["scored"], scores["unscored"]))
    how = "greedy" if evaluation.greedy else "sampled"
    title = f"{evaluation.model}, {how}, {evaluation.repeat} × {evaluation.examples} examples"
    table(("evaluator", "mean, 95 % interval, examples", "scored", "unscored"), rows, title=title)
    causes = [cause.model_dump() for cause in evaluation.output.causes]
    show_troubles(Path(facts["run"]), evaluation.output.calls, causes)


def train(
    config: ConfigFile,
    override: Overrides = None,
    name: Annotated[str | None, option("Name of the run; made up by default.")] = None,
    dataset: Annotated[Path | None, option("Train on this file in place of eval.general.dataset.")] = None,
    validation_dataset: Annotated[Path | None, option("Validate on this file of held-out examples.")] = None,
    validation_interval: Annotated[
        int | None, option("Epochs from one validation to the next.", min=1)
    ] = None,
    on: OnCluster = None,
    as_json: AsJson = False,
) -> None:
    """Train the model of an agent as a config says.

    Ctrl-C stops it at any time, and `etude resume` goes on.
    """
    from etude.config.load import load_config
    from etude.loop.lifecycle import new_run

    overrides = run_configuration(
        dataset=dataset, validation_dataset=validation_dataset, validation_interval=validation_interval
    )
    overrides += on_cluster(on)
    settings = load_config(config, [*(override or ()), *overrides])
    with new_run(settings, name) as run:
        train_in(settings, run, as_json=as_json)


def train_in(settings: Config, run: RunFolder, *, as_json: bool) -> None:
    """Train in an open run folder, and show how it goes and what came of it."""
    from etude.report.progress import progress_for
    from etude.verbs import train_in as train_run

    with then(lambda: hints.after_stop(run.path)), progress_for(json=as_json) as progress:
        summary = run_async(train_run(settings, run, progress=progress)).summary
    if not as_json:
        skipped = f", {summary['epochs_skipped']} skipped" if summary["epochs_skipped"] else ""
        say()
        show_outcome(summary, f"{summary['epochs_trained']} trained{skipped}", run.path)
        say(f"run             {path_shown(run.path)}")
        next_step(hints.after_training(run.path))


def resume(
    run: Annotated[
        str | None,
        argument(
            "A run folder, a run's name, or the address of its backup, as s3://bucket/etude/RUN; by default "
            "the latest unfinished run."
        ),
    ] = None,
    retry_failed: Annotated[
        bool,
        option(
            "In epochs that are not finished, try again what failed without the agent's fault: models "
            "that did not answer, evaluators that gave no score.",
            "--retry-failed",
        ),
    ] = False,
    override: Overrides = None,
    on: OnCluster = None,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was stopped, without repeating anything that it has done.

    `-o` may change how it goes on: `finetuning.num_epochs`, to train for longer, the error budget, time
    limits, concurrency, the cluster (none: `-o cluster=null`), and secrets, which are not kept in run
    folders. From an address the run's folder is made in --output-dir; options of the storage's driver are
    given as `-o storage.options.NAME=VALUE`.
    """
    from etude.backup.address import is_address
    from etude.loop.lifecycle import config_to_resume, note_changes
    from etude.store.facts import find_run, latest_unfinished
    from etude.store.run_folder import RunFolder
    from etude.store.stored_config import read_request

    changes = [*(override or ()), *on_cluster(on)]
    if run is not None and is_address(run):
        path = _restored(run, output_dir, changes, as_json)
    else:
        path = find_run(run, output_dir) if run is not None else latest_unfinished(output_dir)
    request = read_request(path)
    settings = config_to_resume(path, changes)
    with RunFolder.open(path) as folder:
        changed = note_changes(folder, settings)
        if not as_json:
            if run is None:
                say(f"going on with {path.name}")
            for key, (before, after) in changed.items():
                say_wrapped(f"{key}: {_shown(before)} → {_shown(after)}")
        if retry_failed and not _forgets_failures(folder, as_json):
            return
        if request is None:
            train_in(settings, folder, as_json=as_json)
            return
        evaluate_in(settings, folder, request, as_json=as_json)


def _shown(value: Any) -> Any:
    """A setting as it is read: of a block, what it says."""
    if not isinstance(value, dict):
        return value
    return ", ".join(f"{key} {item}" for key, item in value.items() if item is not None) or "none"


def _restored(address: str, output_dir: Path, changes: list[str], as_json: bool) -> Path:
    """Make the folder of a run from its backup, and say what came back; changes its address where it must."""
    from etude.backup.copies import fetch
    from etude.loop.lifecycle import storage_options, storage_overrides

    restored = fetch(address, output_dir, storage_options(changes))
    changes += storage_overrides(restored.run, address)
    if as_json:
        emit({"event": "restored", **restored.as_json()})
    else:
        for line in restored.lines():
            say_wrapped(line)
    return restored.run


def _forgets_failures(folder: RunFolder, as_json: bool) -> bool:
    """Have failures tried again, and say which; False when the run is over, and there is nothing to do."""
    from etude.loop.lifecycle import retry_failed

    forgotten = run_async(retry_failed(folder))
    if as_json:
        emit({"event": "retry_failed", "finished": forgotten is None, "forgotten": dict(forgotten or {})})
    elif forgotten is None:
        say(f"nothing to try again: run {folder.name} is finished, with all its epochs")
    elif not forgotten:
        say("nothing to try again: no failure but the agent's own in epochs that are not finished")
    else:
        say("to be tried again: " + ", ".join(f"{count} × {kind}" for kind, count in forgotten.most_common()))
    return forgotten is not None

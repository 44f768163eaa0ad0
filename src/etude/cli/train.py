"""`etude train`, `resume`, `evaluate` and `export`: train a model, score its agent, take it away."""

from __future__ import annotations

import sys
from dataclasses import asdict
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
    Run,
    RunsFolder,
    argument,
    on_cluster,
    on_error,
    option,
    refuse,
    run_async,
    run_configuration,
)
from etude.cli.console import (
    emit,
    next_step,
    say,
    say_fact,
    say_wrapped,
    show_outcome,
    show_troubles,
    shown_path,
    table,
    warn,
)
from etude.core.errors import RequestError

if TYPE_CHECKING:
    from etude.config.document import Override
    from etude.config.schema import Config
    from etude.loop.evaluation import EvaluationScores
    from etude.store.run_folder import RunFolder
    from etude.store.stored_config import EvaluationRequest


def train(
    config: ConfigFile,
    override: Overrides = None,
    name: Annotated[str | None, option("Name of the run; chosen by default.")] = None,
    dataset: Annotated[Path | None, option("Train on this file instead of eval.general.dataset.")] = None,
    validation_dataset: Annotated[Path | None, option("Validate on this file of held-out examples.")] = None,
    validation_interval: Annotated[
        int | None, option("Epochs from one validation to the next.", min=1)
    ] = None,
    on: OnCluster = None,
    as_json: AsJson = False,
) -> None:
    """Train the model of an agent as a config says.

    Ctrl-C stops the run at any time, and `etude resume` continues it.
    """
    from etude.config.load import load_config
    from etude.verbs import new_run

    overrides = run_configuration(
        dataset=dataset, validation_dataset=validation_dataset, validation_interval=validation_interval
    )
    overrides += on_cluster(on)
    settings = load_config(config, [*(override or ()), *overrides])
    with new_run(settings, name) as run:
        train_and_show(settings, run, as_json=as_json)


def train_and_show(settings: Config, run: RunFolder, *, as_json: bool) -> None:
    """Train in an open run folder, and show the progress and the outcome."""
    from etude.show.progress import progress_for
    from etude.verbs import train_in as train_run

    with on_error(lambda: hints.after_stop(run.path)), progress_for(json=as_json) as progress:
        summary = run_async(train_run(settings, run, progress=progress)).facts.summary
    if not as_json:
        skipped = f", {summary.epochs_skipped} skipped" if summary.epochs_skipped else ""
        say()
        show_outcome(summary, f"{summary.epochs_trained} trained{skipped}", run.path)
        say_fact("run", shown_path(run.path))
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
            "In epochs that are not finished, retry failures that were not the agent's: models that did "
            "not answer, evaluators that gave no score.",
            "--retry-failed",
        ),
    ] = False,
    override: Overrides = None,
    on: OnCluster = None,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Resume a stopped run, without repeating any finished work.

    `-o` may change `finetuning.num_epochs`, to train for longer, the error budget, time limits, concurrency
    and the cluster (`-o cluster=null` for none). It also gives secrets, which run folders do not keep. From
    an address, the run's folder is restored into --output-dir. Give options of the storage's driver as
    `-o storage.options.NAME=VALUE`.
    """
    from etude.loop.arguments import require_objects
    from etude.loop.lifecycle import config_to_resume, note_changes, restore
    from etude.store.facts import find_run, latest_unfinished
    from etude.store.run_folder import RunFolder
    from etude.store.stored_config import read_request

    changes: list[str | Override] = [*(override or ()), *on_cluster(on)]
    if run is not None and "://" in run:
        restored, changes = restore(run, output_dir, changes)
        path = restored.run
        if as_json:
            emit({"event": "restored", **asdict(restored)})
        else:
            say_wrapped(str(restored))
    else:
        path = find_run(run, output_dir) if run is not None else latest_unfinished(output_dir)
    with RunFolder.open(path) as folder:  # This verifies the journal, from which the config is read.
        request, settings = read_request(folder.journal), config_to_resume(path, changes)
        require_objects(settings, folder.path)
        changed = run_async(note_changes(folder, settings))
        if not as_json:
            if run is None:
                say(f"resuming {path.name}")
            for key, (before, after) in changed.items():
                say_wrapped(f"{key}: {_show_setting(before)} → {_show_setting(after)}")
        if retry_failed and not _mark_failures_for_retry(folder, as_json):
            return
        if request is None:
            train_and_show(settings, folder, as_json=as_json)
            return
        evaluate_and_show(settings, folder, request, as_json=as_json)


def _show_setting(value: Any) -> Any:
    """Return a setting for display: a block becomes a list of its keys and values."""
    if not isinstance(value, dict):
        return value
    return ", ".join(f"{key} {item}" for key, item in value.items() if item is not None) or "none"


def _mark_failures_for_retry(folder: RunFolder, as_json: bool) -> bool:
    """Mark failures to be tried again and print their counts. Return False if the run is finished."""
    from etude.loop.lifecycle import retry_failed

    forgotten = run_async(retry_failed(folder))
    if as_json:
        emit({"event": "retry_failed", "finished": forgotten is None, "forgotten": dict(forgotten or {})})
    elif forgotten is None:
        say(f"nothing to retry: run {folder.name} is finished, with all its epochs")
    else:
        counts = ", ".join(f"{count} × {kind}" for kind, count in forgotten.most_common())
        say(f"to be retried: {counts or 'nothing'}")
    return forgotten is not None


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
    from etude.store.facts import find_run
    from etude.store.run_folder import CONFIG
    from etude.store.stored_config import stored_text
    from etude.verbs import new_run, request_for

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
        say_fact("run", shown_path(run.path))
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


def _show(evaluation: EvaluationScores, facts: dict[str, Any], *, as_json: bool) -> None:
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


def export(
    run: Run,
    version: Annotated[
        str,
        option(
            "best, last, base, or a number such as v3; by default the best one where validations "
            "measured any, else the last."
        ),
    ] = "",
    lora: Annotated[bool, option("LoRA weights alone, or the whole model.", "--lora/--merged")] = False,
    out: Annotated[Path | None, option("The folder to write; by default in the run.")] = None,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Export the trained model with a model card."""
    from etude.lost_versions import version_on_disk
    from etude.show.exported_model import export_model, require_lora
    from etude.store.facts import choose_version, find_run
    from etude.store.stored_config import needs_program

    path = find_run(run, output_dir)
    if lora:
        require_lora(choose_version(path, version, kept=False))
    with version_on_disk(path, version, warn) as wanted:
        folder = (out or path / "export" / f"v{wanted.number}{'-lora' if lora else ''}").absolute()
        files = export_model(wanted, folder, lora_only=lora)
    if as_json:
        facts = {"folder": str(folder), "version": wanted.number, "choice": wanted.choice or None}
        emit({**facts, "lora_only": lora, "files": files})
        return
    say_fact("exported", f"{wanted}" + (f"  ({wanted.choice})" if wanted.choice else ""))
    say_fact("to", shown_path(folder))
    say_fact("files", ", ".join(files))
    if not lora and wanted.target is None:
        again = hints.command("evaluate", path / "config.yml", "--model", folder)
        next_step(hints.new_project(shown_path(folder)) if needs_program(path) else again)
    elif wanted.run == path:
        # The exported folder is not a model that the config could use instead of its own.
        next_step(hints.evaluate_version(path, str(wanted).removeprefix(f"{path.name}:")))

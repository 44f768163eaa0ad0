"""`etude episodes` lists the episodes of a run, or shows one. `etude import-traces` makes them of logs."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, OutputDir, argument, option, run_async
from etude.cli.console import emit, next_step, say, say_fact, say_wrapped, shown_path, table
from etude.core.errors import RequestError

if TYPE_CHECKING:
    from etude.store.outline import EpisodeOutline


_WIDEST = 60
"""Characters of a question or answer in a row."""


def episodes(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [WORDS]... | show ID",
            help="A run, and words that filter its episodes; or `show` and the id of an episode.",
            show_default=False,
        ),
    ],
    phase: Annotated[
        str | None,
        option("The phase, such as validation/5 or train/1, or `all`; by default the latest.", "--phase"),
    ] = None,
    limit: Annotated[int, option("The maximum number of episodes.", min=1)] = 50,
    run: Annotated[
        str | None, option("Of `show`: the run; by default the one changed last.", show_default=False)
    ] = None,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """List the episodes of a run that match the words, or show one.

    Words: failed, cut-off, drifted, retried, unscored; reward<0.5, and an evaluator's name likewise; calls,
    tokens, seconds, version; agent:NAME, example:ID. Any other word is searched for in the text. A dash
    before a word means that it must not match. Put words with a dash after `--`.
    """
    if words[0] == "show":
        _show_episode(words[1:], run, output_dir, as_json)
    else:
        _list_episodes(words[0], " ".join(map(shlex.quote, words[1:])), phase, limit, output_dir, as_json)


def _list_episodes(
    name: str, words: str, phase: str | None, limit: int, output_dir: Path, as_json: bool
) -> None:
    from etude.store.episodes import list_phases
    from etude.store.facts import find_run
    from etude.store.outline import find_episodes, parse_query
    from etude.store.run_folder import RunFolder
    from etude.store.stored_config import reward_name

    query, path = parse_query(words), find_run(name, output_dir)
    with RunFolder.read(path) as folder:
        phases = list_phases(folder.journal)
        if phase not in (None, "all", *phases):
            known = ", ".join(phases[:10]) or "none yet"
            raise RequestError(f"there are no episodes of the phase '{phase}'; there are: {known}")
        chosen = phases if phase == "all" else [phase or phases[0]] if phases else []
        selection = find_episodes(folder.journal, chosen, reward_name(path), query, limit=limit)
    if as_json:
        sets = ("agents", "versions")
        rows = [
            {**asdict(each), **{name: sorted(getattr(each, name)) for name in sets}}
            for each in selection.episodes
        ]
        emit([{key: value for key, value in row.items() if key != "stored"} for row in rows])
        return
    where = "all phases" if phase == "all" else chosen[0] if chosen else "no phase"
    if not selection.episodes:
        say(f"no episode of {where} fits, of {selection.looked_at}")
        next_step(hints.show(path))
        return
    table(
        ("episode", "reward", "marks", "version", "tokens", "asked", "output"),
        [_row(episode) for episode in selection.episodes],
    )
    more = f"; there may be more: --limit {2 * limit}" if selection.phase else ""
    say_wrapped(f"{len(selection.episodes)} episodes of {where}, of {selection.looked_at} looked at{more}")
    next_step(hints.command("episodes", "show", selection.episodes[0].id, "--run", path))


def _row(episode: EpisodeOutline) -> tuple[Any, ...]:
    from etude.store.outline import first_question, in_one_line

    answer = episode.output if episode.failure is None else episode.failure.reason
    failure = None if episode.failure is None else f"failed: {episode.failure.kind}"
    counts = {"cut off": episode.cut_off, "drifted": episode.drifted, "retried": episode.retries}
    marks = [failure, *(name for name, count in counts.items() if count)]
    return (
        episode.id,
        episode.reward,
        ", ".join(filter(None, marks)),
        ", ".join(f"v{number}" for number in sorted(episode.versions)),
        episode.tokens,
        in_one_line(first_question(episode.inputs), _WIDEST),
        in_one_line(answer, _WIDEST),
    )


def _show_episode(ids: list[str], run: str | None, output_dir: Path, as_json: bool) -> None:
    from etude.show.turns import episode_transcript
    from etude.store.facts import find_run, list_runs
    from etude.store.run_folder import RunFolder

    if len(ids) != 1:
        raise RequestError("name one episode: etude episodes show train/1/EXAMPLE/0")
    runs = list_runs(output_dir)
    if run is None and not runs:
        raise RequestError(f"there are no runs in {output_dir}; name another folder with --output-dir")
    path = runs[0].absolute() if run is None else find_run(run, output_dir)
    with RunFolder.read(path) as folder:
        text = episode_transcript(folder, ids[0])
    if as_json:
        emit({"run": str(path), "episode": ids[0], "transcript": text})
        return
    say(text.rstrip())
    next_step(hints.show(path))


def import_traces(
    files: Annotated[list[Path], argument("The log: JSON Lines, JSON or Parquet; several files are one.")],
    hold_out: Annotated[
        float, option("Share of the prompts that are held out, to validate on.", min=0, max=0.9)
    ] = 0.2,
    name: Annotated[str | None, option("Name of the run; chosen by default.")] = None,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Store the chats of a log as episodes: to look at, to score, and to learn from.

    Reads rows in OpenAI's format: finished conversations, and requests with their responses.
    """
    from etude.store.facts import imported_lines
    from etude.store.run_folder import RunFolder
    from etude.wire.logged_chats import read_log, write_run

    episodes, imported = read_log(files, hold_out=hold_out)
    with RunFolder.create(output_dir, name) as run:
        run_async(write_run(run, episodes, imported))
    if as_json:
        emit({"run": str(run.path), **asdict(imported)})
        return
    if imported.left_out:
        rows = [(reason, of["count"], of["first"]) for reason, of in imported.left_out.items()]
        table(("left out", "count", "first at"), rows)
    for label, text in imported_lines(asdict(imported)):
        say_fact(label, text)
    say_fact("run", shown_path(run.path))
    next_step(hints.command("episodes", run.path))

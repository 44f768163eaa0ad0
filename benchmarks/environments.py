"""How much tiny models learn in environments over several seeds, from the configs in `examples/environments`.

Each row is a config that is trained as it stands, once for each seed, and measured on its own held-out
examples before training (after the warm-up) and after. In a game in which one model wins what the other
loses, each has the other as it was before training for its opponent, both times. A new row is a config, and
its name in `ENTRIES`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import environment_turns
from common import print_json, print_table, progress, silent

import etude
from etude.core.stats import estimate
from etude.rewards.scorer import read_score
from etude.store.episodes import iter_episodes
from etude.store.run_folder import RunFolder
from etude.store.stored_config import stored_data

EXAMPLES = Path(__file__).parents[1] / "examples" / "environments"
QUICK = ["finetuning.num_epochs=2", "finetuning.run_configuration.validation_interval=2"]

ENTRIES = {
    "gcd": "gcd.yml",
    "letter_counting": "letter_counting.yml",
    "spell_backward": "spell_backward.yml",
    "nim_pool": "../nim/config.yml",
    "mcp": "../calculator/mcp.yml",
    "pair": "pair.yml",
    "kuhn_poker": "kuhn_poker.yml",
    "kuhn_pool": "kuhn_pool.yml",
}
"""The configs, by the names of their rows. Of a config with several targets each is a row: `pair_checker`."""
OPPOSED = {"kuhn_poker.yml"}
"""Games of two trained models in which one wins what the other loses: each is measured against the other as
that was before training."""
NEEDS = {"pair": "verifiers"}
"""Packages without which a row is skipped by name: they do not go together with all others."""

Item = tuple[float | None, str | None]
"""The score of a held-out episode, or the error in its place."""


@dataclass(frozen=True)
class Scores:
    """The held-out scores of a row before and after training, of one seed or of several."""

    before: tuple[float, ...]
    after: tuple[float, ...]
    missing: tuple[str, ...] = ()
    """Why held-out episodes of either have no score, a reason for each."""

    @classmethod
    def of(cls, before: Sequence[Item], after: Sequence[Item]) -> Scores:
        """Those that there are, and why the others are not."""
        scored = (tuple(score for score, _ in items if score is not None) for items in (before, after))
        return cls(*scored, tuple(str(error) for score, error in (*before, *after) if score is None))

    def as_json(self) -> dict[str, Any]:
        """Means with 95 % intervals; `n` is the number of held-out episodes after training."""
        before, after = estimate(self.before), estimate(self.after)
        return {
            "before": before.mean,
            "after": after.mean,
            "ci95_before": [before.low, before.high],
            "ci95_after": [after.low, after.high],
            "n": after.n,
            "unscored": len(self.missing),
            "why_unscored": self.missing[0] if self.missing else None,
        }


def trained(config: str, seed: int, folder: Path, quick: bool) -> dict[str, Scores]:
    """Train a config; its held-out scores, as `measured_in` has them. Raises SystemExit when that fails."""
    settings = [f"finetuning.seed={seed}", f"finetuning.output_dir={folder}", *(QUICK if quick else [])]
    command("train", config, settings, "--name", "run")
    return measured_apart(config, seed, folder) if config in OPPOSED else measured_in(folder / "run")


def command(name: str, config: str, settings: Sequence[str], *options: str) -> str:
    """The output of an `etude` command for an example's config. Raises SystemExit when it fails."""
    overrides = [part for setting in settings for part in ("-o", setting)]
    arguments = [name, str(EXAMPLES / config), *overrides, *options]
    done = subprocess.run([sys.executable, "-m", "etude", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"etude {' '.join(arguments)} failed:\n{done.stderr or done.stdout}")
    return done.stdout


def measured_in(run: Path) -> dict[str, Scores]:
    """The held-out scores of a run by its targets; where it has none, under ""."""
    summary = etude.load_run(run).summary
    summaries = summary.get("targets") or {"": summary}
    return {
        name: Scores.of(held_out(run, reward, 0), held_out(run, reward, summaries[name]["after"]["epoch"]))
        for name, reward in rewards_of(run).items()
    }


def measured_apart(config: str, seed: int, folder: Path) -> dict[str, Scores]:
    """The held-out scores of the targets, where the other's model is that of before training."""
    run, rewards = etude.load_run(folder / "run"), rewards_of(folder / "run")
    before, after = (
        {name: run.version(f"{name}:{which}").export(folder / f"{name}-{which}") for name in rewards}
        for which in ("warm-up", "last")
    )

    def played(models: Mapping[str, Path]) -> dict[str, list[Item]]:
        settings = [f"finetuning.seed={seed}", f"finetuning.output_dir={folder}", "finetuning.warm_up=null"]
        for name, path in models.items():
            settings += [f"llms.{name}.model={path}", f"llms.{name}.tiny=null"]
        items = json.loads(command("evaluate", config, settings, "--json"))["items"]
        return {
            name: [(item["scores"][name], item["errors"].get(name)) for item in items]
            for name in rewards.values()
        }

    at_first = played(before)
    return {
        name: Scores.of(at_first[reward], played({**before, name: after[name]})[reward])
        for name, reward in rewards.items()
    }


def rewards_of(run: Path) -> dict[str, str]:
    """The evaluator that is each target's reward; without targets, under ""."""
    finetuning = stored_data(run)["finetuning"]
    blocks = finetuning.get("targets") or {"": finetuning}
    return {name: block["reward_function"]["name"] for name, block in blocks.items()}


def held_out(run: Path, reward: str, epoch: int) -> list[Item]:
    """The rewards of the validation after an epoch; 0 is the one before training."""
    with RunFolder.open(run) as folder:
        records = iter_episodes(folder.journal, phase=f"validation/{epoch}")
        scored = [(record, read_score(folder.journal, record, reward)) for record in records]
    return [
        (None, record.failure.reason if record.failure else "it was not scored")
        if item is None
        else (item.score, item.error)
        for record, item in scored
    ]


def measured(names: Sequence[str], seeds: int, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """The rows of the entries, over all seeds and for each."""
    rows: dict[str, list[tuple[int, Scores]]] = {}
    for name in names:
        for seed in range(seeds):
            say(f"{name}, seed {seed}")
            with tempfile.TemporaryDirectory() as folder:
                for target, scores in trained(ENTRIES[name], seed, Path(folder), quick).items():
                    rows.setdefault(f"{name}_{target}" if target else name, []).append((seed, scores))
    return {name: pooled(scores) for name, scores in rows.items()}


def skipped(names: Sequence[str]) -> dict[str, str]:
    """The rows that cannot be measured here, and the package that each lacks."""
    return {name: NEEDS[name] for name in names if name in NEEDS and find_spec(NEEDS[name]) is None}


def pooled(rows: Sequence[tuple[int, Scores]]) -> dict[str, Any]:
    """All seeds' scores as one sample, and each seed's."""
    everything = Scores(
        tuple(value for _, scores in rows for value in scores.before),
        tuple(value for _, scores in rows for value in scores.after),
        tuple(reason for _, scores in rows for reason in scores.missing),
    )
    return everything.as_json() | {"seeds": [{"seed": seed} | scores.as_json() for seed, scores in rows]}


def table_rows(environments: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each seed."""
    for name, row in environments.items():
        for each in row["seeds"]:
            yield (
                name,
                str(each["seed"]),
                *(shown(each, when) for when in ("before", "after")),
                str(each["n"]),
            )


def shown(row: dict[str, Any], when: str) -> str:
    """A mean with its interval."""
    low, high = row[f"ci95_{when}"]
    return f"{row[when]:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    """Measure the rows that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0")
    parser.add_argument("--only", choices=[*ENTRIES], action="append", help="this row alone; may be repeated")
    parser.add_argument("--quick", action="store_true", help="two epochs of one seed: whether it runs at all")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    given = parser.parse_args()
    say, seeds = silent if given.json else progress, 1 if given.quick else given.seeds
    wanted = given.only or [*ENTRIES]
    left_out = skipped(wanted)
    environments = measured([name for name in wanted if name not in left_out], seeds, given.quick, say)
    turns = {}
    for name in wanted:
        if name not in left_out:
            say(f"{name}, the cost of a turn")
            turns[name] = environment_turns.measured(EXAMPLES / ENTRIES[name], given.quick)
    overhead = {name: turn["overhead"] for name, turn in turns.items()}
    result = {
        "environments": environments,
        "overhead_ms_per_turn": overhead,
        "ms_per_turn": turns,
        "skipped": left_out,
    }
    if given.json:
        print_json(result)
        return
    columns = ("environment", "seed", "before", "after", "n")
    notes = [f"{name}: a turn costs {ms:.2f} ms of CPU time more than alone" for name, ms in overhead.items()]
    notes += [
        f"{name}: {row['unscored']} held-out episodes have no score: {row['why_unscored']}"
        for name, row in environments.items()
        if row["unscored"]
    ]
    notes += [f"{name} is skipped: {package} is not installed" for name, package in left_out.items()]
    print_table("Held-out reward, 95 % intervals", columns, [*table_rows(environments)], notes)


if __name__ == "__main__":
    main()

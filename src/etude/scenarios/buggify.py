"""Making wrong programs from right ones with a model, each tried out in the sandbox.

Every answer of the model and every trial is a journalled step: a run that was stopped goes on where it
was, and pays for nothing twice.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from etude.core.call import ChatRequest, Sampling
from etude.core.errors import DatasetError, EtudeError, ModelOut, RequestError, StoreError
from etude.core.interfaces import Engine
from etude.core.keys import content_hash, fold, generator
from etude.core.message import Message
from etude.scenarios.datasets import FILE_TYPES, AppsConfig, ProgramProblem, ProgramsConfig, read_problems
from etude.scenarios.edits import comments, edit_distance, program_in, same_program
from etude.scenarios.sandbox.check import IoTests, check_program
from etude.scenarios.sandbox.limits import Limits
from etude.store.database import DATABASE
from etude.store.files import write_atomically
from etude.store.journal import Journal
from etude.store.run_folder import RunFolder

Row = dict[str, Any]
"""A row with the columns of `lrhammond/buggy-apps`, and APPS's `input_output`."""


@dataclass(frozen=True, slots=True)
class BuggifySettings:
    """How wrong programs are made. Raises RequestError for numbers that allow none."""

    model: str = ""
    """Name of the model, under which its answers are kept."""
    share: float = 1.0
    """The share of a problem's right programs that are made wrong, rounded up; which ones, is drawn."""
    most_per_problem: int = 1
    """No more of a problem's programs than this."""
    max_attempts: int = 10
    """Answers of the model for one program."""
    temperature: float = 1.0
    max_tokens: int | None = 4096
    seed: int = 0
    limits: Limits = field(default_factory=Limits)
    """Of the sandbox, for each test of a whole program, or for all calls of a function."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise RequestError(f"share must be more than 0 and at most 1, found {self.share}")
        for name in ("most_per_problem", "max_attempts"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, found {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Buggified:
    """The wrong programs that were made, and the problems that were left out."""

    rows: tuple[Row, ...]
    """The problems for which there is a wrong program, in their order."""
    left_out: Mapping[str, int]
    """Problems without one, by reason."""
    attempts: int
    """Answers of the model, those of earlier runs included."""


OnProblem = Callable[[str, Row | None], None]
"""Called after each problem, with its id and its row, if there is one."""


async def buggify(
    problems: Iterable[ProgramProblem],
    engine: Engine,
    journal: Journal,
    settings: BuggifySettings | None = None,
    *,
    max_concurrency: int = 8,
    on_problem: OnProblem | None = None,
) -> Buggified:
    """Have a model plant a bug in right programs, until each runs and fails some of its tests.

    A program is tried out before: one that fails its tests is not right, and its problem is left out, as
    is one without tests. A problem on which the model's calls fail is left out too, and tried again the
    next time. Raises EtudeError when no call succeeded, StoreError when the journal
    cannot be written.
    """
    chosen = settings or BuggifySettings()
    waiting = enumerate(problems)
    done: dict[int, _Outcome] = {}

    async def work() -> None:
        for index, problem in waiting:
            outcome = await _Maker(problem, engine, journal, chosen).outcome()
            done[index] = outcome
            if on_problem is not None:
                on_problem(problem.id, outcome.row)

    await asyncio.gather(*(work() for _ in range(max_concurrency)))
    outcomes = [done[index] for index in sorted(done)]
    failed = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    if failed and not any(outcome.attempts for outcome in outcomes):
        raise EtudeError(f"the model's calls failed for all of {len(failed)} problems: {failed[0]}")
    return Buggified(
        rows=tuple(outcome.row for outcome in outcomes if outcome.row is not None),
        left_out=dict(Counter(outcome.reason for outcome in outcomes if outcome.row is None)),
        attempts=sum(outcome.attempts for outcome in outcomes),
    )


@dataclass(frozen=True, slots=True)
class _Outcome:
    row: Row | None = None
    reason: str = ""
    attempts: int = 0
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class _Wrong:
    """A wrong program, or why there is none."""

    solution: str | None
    attempts: int
    checks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the wrong programs of one problem."""

    problem: ProgramProblem
    engine: Engine
    journal: Journal
    settings: BuggifySettings

    async def outcome(self) -> _Outcome:
        """The row of the problem, or why there is none."""
        problem = self.problem
        if problem.tests is None:
            return _Outcome(reason="it has no tests")
        if not problem.right:
            return _Outcome(reason="it has no right program")
        try:
            attempted = [(n, await self._make(n, problem.right[n], problem.tests)) for n in self._chosen()]
        except (ModelOut, StoreError):
            raise
        except EtudeError as error:
            return _Outcome(reason="a call failed", failure=str(error))
        attempts = sum(0 if wrong is None else wrong.attempts for _, wrong in attempted)
        wrong_programs = [
            (n, wrong) for n, wrong in attempted if wrong is not None and wrong.solution is not None
        ]
        if wrong_programs:
            return _Outcome(self._row(wrong_programs, problem.tests), attempts=attempts)
        if all(wrong is None for _, wrong in attempted):
            return _Outcome(reason="its right program fails its tests")
        return _Outcome(reason=f"no fitting bug in {self.settings.max_attempts} attempts", attempts=attempts)

    def _chosen(self) -> list[int]:
        """Which of the problem's programs are made wrong."""
        count = len(self.problem.right)
        wanted = min(math.ceil(self.settings.share * count), self.settings.most_per_problem)
        return sorted(generator(self.settings.seed, "buggify", self.problem.id).sample(range(count), wanted))

    async def _make(self, number: int, right: str, tests: IoTests) -> _Wrong | None:
        """A wrong program made from a right one. None when that one is not right."""
        settings, base = self.settings, f"buggify/{self.problem.id}/{content_hash([right, tests.to_json()])}"
        if (await self._check(f"{base}/right", right, tests))["status"] != "ok":
            return None
        messages: list[Message] = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": _QUESTION.format(question=self.problem.question, solution=right)},
        ]
        for attempt in range(settings.max_attempts):
            key = fold(settings.seed, "buggify", self.problem.id, number, attempt)
            text = await self._answer(f"{base}/{self._asked_of()}/{attempt}", messages, key)
            wrong, objection = program_in(text), ""
            if wrong is None:
                objection = "There is no Python program in a code block in it"
            elif same_program(wrong, right):
                objection = "It does the same: the program was not changed"
            elif comments(wrong) > comments(right):
                objection = "It has new comments, which give the bug away"
            else:
                checked = await self._check(f"{base}/wrong/{content_hash(wrong)}", wrong, tests)
                objection = _objection(checked)
                if not objection:
                    return _Wrong(wrong, attempt + 1, checked["checks"])
            messages = [
                *messages[:2],
                {"role": "assistant", "content": text},
                {"role": "user", "content": _AGAIN.format(objection=objection)},
            ]
        return _Wrong(None, settings.max_attempts, {})

    def _asked_of(self) -> str:
        """All that the answers depend on beside the program."""
        settings = self.settings
        return content_hash([settings.model, settings.temperature, settings.max_tokens, settings.seed])

    async def _answer(self, key: str, messages: Sequence[Message], seed: int) -> str:
        sampling = Sampling(temperature=self.settings.temperature, max_tokens=self.settings.max_tokens)

        async def ask() -> str:
            request = ChatRequest(messages=tuple(messages), sampling=sampling, key=seed)
            return str((await self.engine.complete(request)).message.get("content") or "")

        return str(await self.journal.step(key, ask))

    async def _check(self, key: str, program: str, tests: IoTests) -> Mapping[str, Any]:
        async def check() -> dict[str, Any]:
            result = await check_program(program, tests, limits=self.settings.limits)
            checks = {"pass": result.passed, "fail": result.failed, "error": result.errors}
            return {"status": result.status, "reason": result.reason, "checks": checks}

        result: Mapping[str, Any] = await self.journal.step(key, check)
        return result

    def _row(self, wrong_programs: Sequence[tuple[int, _Wrong]], tests: IoTests) -> Row:
        problem = self.problem
        return {
            "apps_split": problem.split or "train",
            "apps_problem_id": problem.id,
            "difficulty": problem.difficulty,
            "question": problem.question,
            "solutions": [
                {"apps_solution_number": number, "solution": problem.right[number]}
                for number, _ in wrong_programs
            ],
            "buggy_solutions": [
                {
                    "apps_solution_number": number,
                    "solution": wrong.solution,
                    "levenshtein_distance": edit_distance(problem.right[number], wrong.solution or ""),
                    "checks": dict(wrong.checks),
                    "generation_attempts": wrong.attempts,
                }
                for number, wrong in wrong_programs
            ],
            "flags": "",
            "input_output": json.dumps(tests.to_json()),
        }


def _objection(checked: Mapping[str, Any]) -> str:
    """Why a wrong program cannot be used; empty when it can."""
    if checked["status"] == "ok":
        return "It passes all of its tests"
    if not checked["checks"]["fail"] or checked["checks"]["error"]:
        return f"It does not run to its end on all tests ({checked['reason']})"
    if not checked["checks"]["pass"]:
        return "It is wrong on all of its tests, which is too easy to see"
    return ""


_SYSTEM = """\
You make material for teaching people to read code with care. You are given a problem and a right program. \
Change the program so that it is subtly wrong: it must still run without errors, look as if it were written \
with care, and give the right result on most inputs, but a wrong one on some that the problem allows. Change \
as little as you can, as a mistake of an experienced programmer would: a bound, a condition, an order, a \
case that is forgotten. Do not add comments, and do not mention the mistake in the program.

First think about which mistake is easy to miss. Then write the whole changed program in one Python code \
block, as the last thing in your answer."""

_QUESTION = """\
The problem:

{question}

The program:

```python
{solution}
```"""

_AGAIN = "This cannot be used. {objection}. Try another change, and write the whole program again."


OnProgress = Callable[[int, int, int], None]
"""Called after each problem, with the numbers done, in all, and with a wrong program."""


def work_folder(out: Path) -> Path:
    """The folder with everything that was paid for so far."""
    return out.with_name(f"{out.name}.work")


def programs_config(
    source: str, *, split: str | None = None, difficulty: str | None = None
) -> ProgramsConfig:
    """The data set that a file, or a name on the hub, stands for."""
    is_file = Path(source).suffix.lower() in FILE_TYPES
    location = {"file_path": source} if is_file else {"path": source}
    return AppsConfig.model_validate({**location, "split": split, "difficulty": difficulty})


async def buggify_file(
    config: ProgramsConfig,
    out: Path,
    engine: Engine,
    settings: BuggifySettings,
    *,
    limit: int | None = None,
    max_concurrency: int = 8,
    on_progress: OnProgress | None = None,
) -> Buggified:
    """Buggify the first `limit` problems of a data set, and write the rows to `out` as JSON Lines.

    The file is written when all is done. Raises what `buggify` raises, DatasetError when there are no
    problems, and StoreError when the file or the folder beside it cannot be written, or is in use.
    """
    problems = list(islice(read_problems(config), limit))
    if not problems:
        raise DatasetError(f"{config.file_path or config.path}: there are no problems as asked for")
    done = with_bug = 0

    def count(_: str, row: Row | None) -> None:
        nonlocal done, with_bug
        done, with_bug = done + 1, with_bug + (row is not None)
        if on_progress is not None:
            on_progress(done, len(problems), with_bug)

    folder = work_folder(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    is_begun = (folder / DATABASE).exists()
    with RunFolder.open(folder) if is_begun else RunFolder.create(folder.parent, folder.name) as run:
        buggified = await buggify(
            problems, engine, run.journal, settings, max_concurrency=max_concurrency, on_problem=count
        )
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in buggified.rows)
    write_atomically(out, lines, exact=True)
    return buggified

"""Programs as examples: a problem, a program, and whether the program is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from etude.config.registry import register_dataset
from etude.core.errors import DatasetError
from etude.core.example import Example
from etude.core.keys import generator
from etude.protocols.decision import ACCEPT, REJECT
from etude.scenarios.dataset_config import AppsConfig, BuggyAppsConfig, ProgramsConfig
from etude.scenarios.problems import ProgramProblem, read_problems

if TYPE_CHECKING:
    from etude.config.builder import Builder


class Programs:
    """The programs that a config describes."""

    def __init__(self, config: ProgramsConfig) -> None:
        self._config = config

    def examples(self) -> list[Example]:
        """All examples, in order. Raises DatasetError when they cannot be read."""
        return load_programs(self._config)


def load_programs(config: ProgramsConfig) -> list[Example]:
    """An example for each program: inputs `question` and `solution`, expected 1 (right) or 0 (wrong).

    The right programs of a problem come first, then the wrong ones. Raises DatasetError for data that
    cannot be read, that has no programs as the config asks for, or where two problems have one id.
    """
    examples: list[Example] = []
    places: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    for problem in read_problems(config, left_out):
        if problem.id in places:
            raise DatasetError(
                f"{problem.where}: problem id '{problem.id}' is taken already by {places[problem.id]}; "
                "name one `split`, or make the ids unique"
            )
        places[problem.id] = problem.where
        examples += _examples(problem, config)
    if not examples:
        raise DatasetError(
            f"{config.file_path or config.path}: {_nothing_left(config, len(places), left_out)}"
        )
    if config.shuffle:
        generator(config.seed, "programs").shuffle(examples)
    return examples[: config.limit]


def _nothing_left(config: ProgramsConfig, problems: int, left_out: Counter[str]) -> str:
    """Why there is no program: what the config asked for that no row has."""
    rows = problems + left_out.total()
    reasons = [f"{count} {reason}" for reason, count in left_out.most_common()]
    if problems and config.solution_number is not None:
        reasons.append(f"{problems} without a program number {config.solution_number} (`solution_number`)")
    elif problems:
        reasons.append(f"{problems} without programs")
    return f"no programs are left of {rows} problems" + (f": {'; '.join(reasons)}" if reasons else "")


def _examples(problem: ProgramProblem, config: ProgramsConfig) -> Iterator[Example]:
    for name, programs, verdict in (("right", problem.right, ACCEPT), ("wrong", problem.wrong, REJECT)):
        for number, program in enumerate(programs):
            if config.solution_number in (None, number):
                inputs = {"question": problem.question, "solution": program}
                yield Example(f"{problem.id}-{name}-{number}", inputs, verdict)


@register_dataset(config_type=AppsConfig)
@register_dataset(config_type=BuggyAppsConfig)
async def programs(config: ProgramsConfig, builder: Builder) -> AsyncIterator[Programs]:
    """Both data sets have rows that are read alike."""
    yield Programs(config)

"""Tests of a program: inputs, and the outputs that they should give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etude.core.errors import RequestError
from etude.scenarios.sandbox.process import Limits
from etude.scenarios.sandbox.run import SandboxResult, Status, call_function, run_program

_TOLERANCE = 1e-6
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class IoTests:
    """Inputs and the outputs that go with them, in the form of the APPS data set.

    With a `function`, each input is its list of arguments and each output a value. Without one, they are
    the texts on standard input and standard output. What is expected never enters the sandbox.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    function: str | None = None

    def __post_init__(self) -> None:
        """Raises RequestError when inputs and outputs do not go together."""
        if len(self.inputs) != len(self.outputs):
            raise RequestError(f"{len(self.inputs)} inputs and {len(self.outputs)} outputs are not tests")
        if self.function is not None and not all(
            isinstance(arguments, list | tuple) for arguments in self.inputs
        ):
            raise RequestError(f"each input of the function '{self.function}' is a list of arguments")

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How a program did on its tests."""

    status: Status
    """Of the first test that it did not pass; `ok` when it passed all."""
    reason: str = ""
    passed: int = 0
    failed: int = 0
    """Tests that gave something else."""
    errors: int = 0
    """Tests that gave nothing: an error, a time-out, or a test that was not reached."""


async def check_program(source: str, tests: IoTests, *, limits: Limits | None = None) -> CheckResult:
    """Run a program on its tests in the sandbox.

    Calls of a function share one process, and its limits; a whole program has a process for each test.
    Raises RequestError when there are no tests, EtudeError when no process can be started.
    """
    if not len(tests):
        raise RequestError("a program without tests cannot be checked")
    if tests.function is not None:
        result = await call_function(source, tests.function, tests.inputs, limits=limits)
        return _of_calls(result, tests)
    outcomes: list[tuple[Status, str]] = []
    for stdin, expected in zip(tests.inputs, tests.outputs, strict=True):
        result = await run_program(source, stdin=_text(stdin), limits=limits)
        outcomes.append(_of_output(result, _text(expected)))
    return _verdict(outcomes, len(tests))


def _of_calls(result: SandboxResult, tests: IoTests) -> CheckResult:
    outcomes: list[tuple[Status, str]] = []
    for arguments, expected, returned in zip(tests.inputs, tests.outputs, result.returned, strict=False):
        call = f"{tests.function}({', '.join(map(repr, arguments))})"
        if returned.error is not None:
            outcomes.append(("error", f"{call} raised {returned.error}"))
        elif same_value(returned.value, expected):
            outcomes.append(("ok", ""))
        else:
            outcomes.append(
                ("wrong", f"{call} gave {returned.value!r:.{_SHOWN}}, not {expected!r:.{_SHOWN}}")
            )
    if result.status != "ok":
        outcomes.append((result.status, result.reason))
    return _verdict(outcomes, len(tests))


def _of_output(result: SandboxResult, expected: str) -> tuple[Status, str]:
    if result.status != "ok" or same_output(result.output, expected):
        return result.status, result.reason
    return "wrong", f"it wrote {result.output!r:.{_SHOWN}}, not {expected!r:.{_SHOWN}}"


def _verdict(outcomes: Sequence[tuple[Status, str]], tests: int) -> CheckResult:
    passed = sum(status == "ok" for status, _ in outcomes)
    failed = sum(status == "wrong" for status, _ in outcomes)
    lost: tuple[Status, str] = ("error", "it gave no result") if len(outcomes) < tests else ("ok", "")
    status, reason = next((outcome for outcome in outcomes if outcome[0] != "ok"), lost)
    return CheckResult(status, reason, passed, failed, tests - passed - failed)


def same_output(output: str, expected: str) -> bool:
    """Whether two texts are the same but for white space, and numbers but for rounding."""
    lines, wanted = (
        [line.split() for line in text.split("\n") if line.strip()] for text in (output, expected)
    )
    return len(lines) == len(wanted) and all(
        len(line) == len(want) and all(map(_same_word, line, want))
        for line, want in zip(lines, wanted, strict=True)
    )


def same_value(value: Any, expected: Any) -> bool:
    """Whether two JSON values are the same, numbers but for rounding."""
    if isinstance(value, list) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same_value(value[key], expected[key]) for key in value)
    if isinstance(value, float) or isinstance(expected, float):
        return _close(value, expected)
    return bool(value == expected)


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not any(mark in word + expected for mark in ".eE"):
        return False
    try:
        return _close(float(word), float(expected))
    except ValueError:
        return False


def _close(value: Any, expected: Any) -> bool:
    numbers = isinstance(value, int | float) and isinstance(expected, int | float)
    both_nan = value != value and expected != expected
    return numbers and (both_nan or math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE))


def _text(value: Any) -> str:
    """APPS gives some texts as lists of lines."""
    return value if isinstance(value, str) else "\n".join(map(str, value)) + "\n"

"""Programs against tests of inputs and outputs."""

from __future__ import annotations

import pytest

from etude.core.errors import RequestError
from etude.scenarios.sandbox.check import IoTests, check_program, same_output, same_value

DOUBLE = "print(int(input()) * 2)"
DOUBLES = IoTests(("1\n", "4\n"), ("2\n", "8\n"))
HALVES = IoTests(([4], [3], [0]), (2, 1.5, 0), "half")


async def test_a_right_program_is_ok():
    result = await check_program(DOUBLE, DOUBLES)
    assert (result.status, result.reason, result.passed, result.failed, result.errors) == (
        "ok",
        "",
        2,
        0,
        0,
    )
    assert (await check_program("def half(x): return x / 2", HALVES)).passed == 3


async def test_a_wrong_program_is_told_by_its_first_wrong_test():
    result = await check_program("print(2 + 2 * (int(input()) > 1))", DOUBLES)
    assert (result.status, result.passed, result.failed) == ("wrong", 1, 1)
    assert result.reason == "it wrote '4\\n', not '8\\n'"
    result = await check_program("def half(x): return x // 2", HALVES)
    assert (result.status, result.passed, result.failed) == ("wrong", 2, 1)
    assert result.reason == "half(3) gave 1, not 1.5"


async def test_errors_are_counted_apart():
    result = await check_program("def half(x): return x / 2 if x else 1 / x", HALVES)
    assert (result.status, result.passed, result.failed, result.errors) == ("error", 2, 0, 1)
    assert result.reason.startswith("half(0) raised ZeroDivisionError")
    result = await check_program("raise SystemExit(1)", DOUBLES)
    assert (result.status, result.passed, result.errors) == ("error", 0, 2)


async def test_a_program_that_leaves_early_has_not_passed():
    result = await check_program("import os\ndef half(x): os._exit(0)", HALVES)
    assert (result.status, result.reason, result.errors) == ("error", "it gave no result", 3)


async def test_the_expected_output_is_not_to_be_found_inside():
    thief = """
import gc, sys
def secret(x):
    held = [one for one in gc.get_objects() if isinstance(one, (list, dict))]
    return any("a4b7" + "9c" in map(str, one.values() if isinstance(one, dict) else one) for one in held)
"""
    result = await check_program(thief, IoTests(([1],), ("a4b79c",), "secret"))
    assert result.reason == "secret(1) gave False, not 'a4b79c'"


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n3", " 1  2 \n\n3\n", True),
        ("1 2", "1\n2", False),
        ("0.3333333", "0.33333333333", True),
        ("1.0", "1", True),
        ("100000001", "100000002", False),
        ("YES", "yes", False),
        ("", "", True),
        ("x.", "x", False),
    ],
)
def test_output_is_compared_without_white_space_and_rounding(found: str, expected: str, same: bool):
    assert same_output(found, expected) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ([1, [2.0000000001]], (1, [2]), True),
        ([1, 2], [1], False),
        ({"a": 0.1}, {"a": 0.1}, True),
        ("1", 1, False),
        (float("nan"), float("nan"), True),
        (None, 0.0, False),
        (0, 0.5, False),
    ],
)
def test_values_are_compared_as_json_keeps_them(found: object, expected: object, same: bool):
    assert same_value(found, expected) is same


async def test_no_tests_are_no_proof():
    with pytest.raises(RequestError, match="without tests"):
        await check_program(DOUBLE, IoTests((), ()))

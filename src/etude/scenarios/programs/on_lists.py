"""Families of problems about lists of numbers."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

from etude.scenarios.programs.problem import Problem, make_problem, numbers


def count_between(random: random.Random) -> Problem:
    """Count what lies between two bounds."""
    low, high = random.choice((("<", "<"), ("<=", "<"), ("<", "<="), ("<=", "<=")))
    words = {"<": "strictly ", "<=": ""}
    counted = random.choice((True, False))

    def oracle(values: list[int], least: int, most: int) -> int:
        kept = [value for value in values if value in range(least + (low == "<"), most + (high == "<="))]
        return len(kept) if counted else sum(kept)

    return make_problem(
        "count_between",
        "values, least, most",
        """that returns $what the numbers in the list `values` that are ${above}above `least` and
        ${below}below `most`. Where it does not say strictly, a number that is equal is meant too.""",
        f"""
        result = 0
        for value in values:
            if least {low} value and value {high} most:
                result += {1 if counted else "value"}
        return result
        """,
        oracle,
        [
            [[1, 2, 3, 4, 5], 2, 4],
            [[7, 7], 7, 9],
            [[], 0, 1],
            [[3, 3, 1], 3, 3],
            *([numbers(random, 8), *sorted(random.sample(range(-8, 9), 2))] for _ in range(7)),
        ],
        {"what": "the number of" if counted else "the sum of", "above": words[low], "below": words[high]},
    )


def longest_climb(random: random.Random) -> Problem:
    """The longest stretch in which each number goes on from the one before."""
    word, sign = random.choice((("greater", ">"), ("smaller", "<")))
    equal = random.choice((True, False))
    step = random.choice((0, 1, 2))

    def oracle(values: list[int]) -> int:
        def goes_on(a: int, b: int) -> bool:
            gain = b - a if sign == ">" else a - b
            return gain > step or (equal and gain == step)

        best = 1 if values else 0
        for start, end in combinations(range(len(values) + 1), 2):
            if all(goes_on(a, b) for a, b in pairwise(values[start:end])):
                best = max(best, end - start)
        return best

    difference = "current - previous" if sign == ">" else "previous - current"
    return make_problem(
        "longest_climb",
        "values",
        """that returns the length of the longest stretch of neighbours in the list `values` in which each
        number is $word than the one before by $by. A single number is a stretch of length 1; an empty list
        has none, and the answer is 0.""",
        f"""
        if not values:
            return 0
        best = 1
        length = 1
        for previous, current in zip(values, values[1:]):
            if {difference} {">=" if equal else ">"} {step}:
                length += 1
            else:
                length = 1
            best = max(best, length)
        return best
        """,
        oracle,
        [
            [[1, 2, 4, 4, 7, 9]],
            [[9, 7, 4, 4, 2, 1]],
            [[]],
            [[5]],
            [[1, 2, 3, 4, 1, 2]],
            [[8, 6, 4, 2, 0]],
            *([numbers(random, 8, 0, 6)] for _ in range(6)),
        ],
        {"word": word, "by": f"{step} or more" if equal else f"more than {step}"},
    )


def runner_up(random: random.Random) -> Problem:
    """The second largest or smallest of the different numbers."""
    largest = random.choice((True, False))
    nothing = random.choice((0, -1, 100))
    sign = ">" if largest else "<"

    def oracle(values: list[int]) -> int:
        different = sorted(set(values), reverse=largest)
        return different[1] if len(different) > 1 else nothing

    return make_problem(
        "runner_up",
        "values",
        """that returns the second $which of the different numbers in the list `values`, or $nothing when
        there are fewer than two different ones.""",
        f"""
        first = None
        second = None
        for value in values:
            if first is None or value {sign} first:
                second = first
                first = value
            elif value != first and (second is None or value {sign} second):
                second = value
        if second is None:
            return $nothing
        return second
        """,
        oracle,
        [
            [[3, 1, 2]],
            [[5, 5, 4, 5]],
            [[2, 2]],
            [[]],
            [[7]],
            [[1, 2, 2, 3, 3]],
            *([numbers(random, 6, -4, 6)] for _ in range(6)),
        ],
        {"which": "largest" if largest else "smallest", "nothing": nothing},
    )


def rotated(random: random.Random) -> Problem:
    """Turn a list around by some places."""
    left = random.choice((True, False))
    times = random.choice((1, 2, 3))
    cut = "places" if left else "len(values) - places"

    def oracle(values: list[int], places: int) -> list[int]:
        by = places * (times if left else -times)
        return [values[(index + by) % len(values)] for index in range(len(values))]

    return make_problem(
        "rotated",
        "values, places",
        """that returns a new list: `values` moved to the $side by $times `places`, which is not negative and
        may be more than the length of the list. What falls out on one side comes in on the other.""",
        f"""
        if not values:
            return []
        places = {"" if times == 1 else f"{times} * "}places % len(values)
        cut = {cut}
        return values[cut:] + values[:cut]
        """,
        lambda values, places: [
            values[(index + (times if left else -times) * places) % len(values)]
            for index in range(len(values))
        ],
        [
            [[1, 2, 3, 4, 5], 2],
            [[1, 2, 3], 4],
            [[], 3],
            [[1, 2, 3], 0],
            [[1, 2], 2],
            *([numbers(random, 6), random.randint(0, 8)] for _ in range(6)),
        ],
        {"side": "left" if left else "right", "times": {1: "", 2: "twice", 3: "three times"}[times]},
    )


def best_window(random: random.Random) -> Problem:
    """The greatest or least sum of neighbours."""
    greatest = random.choice((True, False))
    size = random.choice((2, 3, 4))
    nothing = random.choice((0, -1))

    def oracle(values: list[int]) -> int:
        sums = [sum(values[start : start + size]) for start in range(len(values) - size + 1)]
        return (max if greatest else min)(sums, default=nothing)

    return make_problem(
        "best_window",
        "values",
        """that returns the $which sum of $size neighbouring numbers in the list `values`, or $nothing when
        the list has fewer than $size numbers.""",
        f"""
        if len(values) < $size:
            return $nothing
        total = sum(values[:$size])
        best = total
        for index in range($size, len(values)):
            total += values[index] - values[index - $size]
            if total {">" if greatest else "<"} best:
                best = total
        return best
        """,
        oracle,
        [
            [[1, -2, 3, 4, -5, 6]],
            [[5] * size],
            [[1] * (size - 1)],
            [[]],
            [[-1, -2, -3, -4, -5, -6]],
            *([numbers(random, 9)] for _ in range(7)),
        ],
        {"which": "greatest" if greatest else "least", "size": size, "nothing": nothing},
    )


FAMILIES = (count_between, longest_climb, runner_up, rotated, best_window)

"""Families of problems about ordered lists, intervals, pairs and tables."""

from __future__ import annotations

import random
from itertools import combinations, groupby
from typing import Any

from etude.scenarios.programs.problem import Problem, make_problem, numbers


def trimmed_mean(random: random.Random) -> Problem:
    """The mean without the extremes."""
    trim = random.choice((1, 2))
    side = random.choice(("smallest and the", "smallest", "largest"))
    mean = random.choice((True, False))
    start = trim if side.startswith("smallest") else 0
    end = trim if side != "smallest" else 0
    what = {
        "smallest and the": f"the {trim} smallest and the {trim} largest",
        "smallest": f"the {trim} smallest",
        "largest": f"the {trim} largest",
    }[side]

    def oracle(values: list[int]) -> int:
        kept = list(values)
        for _ in range(trim):
            for extreme, leaves in ((min, start), (max, end)):
                if leaves and kept:
                    kept.remove(extreme(kept))
        return 0 if not kept else sum(kept) // (len(kept) if mean else 1)

    return make_problem(
        "trimmed_mean",
        "values",
        """that leaves out $what of the numbers in the list `values` and returns $result. It returns 0 when
        no numbers are left.""",
        f"""
        ordered = sorted(values)
        kept = ordered[{start or ""}:{f"len(ordered) - {end}" if end else ""}]
        if len(ordered) <= {start + end}:
            return 0
        total = 0
        for value in kept:
            total += value
        return total{" // len(kept)" if mean else ""}
        """,
        oracle,
        [
            [[4, 1, 9, 6, 2]],
            [[1] * (start + end)],
            [[2, 8] * (start + end)],
            [[]],
            [[-7, -2, 0, 1, 5, 5, 20]],
            *([numbers(random, 8, -20, 20)] for _ in range(7)),
        ],
        {
            "what": what,
            "result": "the mean of the others, rounded down to a whole number"
            if mean
            else "the sum of the others",
        },
    )


def merged(random: random.Random) -> Problem:
    """Join intervals that overlap."""
    touching = random.choice((True, False))
    what, returned = random.choice(
        (
            ("list", "result"),
            ("number", "len(result)"),
            ("length", "sum((end - start for start, end in result))"),
        )
    )

    def oracle(intervals: list[list[int]]) -> Any:
        # On a grid twice as fine, so that what lies between two whole numbers counts too.
        points: set[int] = set()
        for start, end in intervals:
            points |= set(range(2 * start + (not touching), 2 * end + touching))
        found = []
        for _, group in groupby(enumerate(sorted(points)), key=lambda pair: pair[1] - pair[0]):
            members = [point for _, point in group]
            found.append([members[0] // 2, (members[-1] + 1) // 2])
        return {"list": found, "number": len(found), "length": sum(end - start for start, end in found)}[what]

    def interval() -> list[int]:
        start = random.randint(0, 15)
        return [start, start + random.randint(1, 4)]

    return make_problem(
        "merged",
        "intervals",
        """that gets a list of intervals `[start, end]` with `start < end`, joins all that overlap into one,
        and returns $what. Two intervals that only touch, as [1, 3] and [3, 4] do, are $touching.""",
        f"""
        result = []
        for start, end in sorted(intervals):
            if result and start {"<=" if touching else "<"} result[-1][1]:
                result[-1][1] = max(result[-1][1], end)
            else:
                result.append([start, end])
        return {returned}
        """,
        oracle,
        [
            [[[1, 3], [3, 4]]],
            [[[5, 8], [1, 2], [6, 9]]],
            [[]],
            [[[1, 9], [2, 3]]],
            [[[2, 4], [2, 6], [1, 3]]],
            *([[interval() for _ in range(random.randint(1, 5))]] for _ in range(7)),
        ],
        {
            "touching": "joined too" if touching else "not joined",
            "what": {
                "list": "a list of what comes of it, in the order of the starts",
                "number": "how many intervals come of it",
                "length": "the sum of the lengths `end - start` of what comes of it",
            }[what],
        },
    )


def place_of(random: random.Random) -> Problem:
    """Find a number in a sorted list by halving."""
    first = random.choice((True, False))
    rising = random.choice((True, False))
    nothing = random.choice((-1, -2))

    def oracle(values: list[int], wanted: int) -> int:
        places = [index for index, value in enumerate(values) if value == wanted]
        return (places[0] if first else places[-1]) if places else nothing

    sign = "<" if rising else ">"
    inside, found = ("low < len(values)", "low") if first else ("low > 0", "low - 1")
    cases: list[tuple[list[int], int]] = [
        ([1, 3, 3, 3, 8], 3),
        ([1, 3, 8], 4),
        ([], 1),
        ([2, 2], 2),
        ([1, 5], 9),
        ([1, 5], 0),
        ([1, 4, 6], 1),
        ([1, 4, 6], 6),
        *((sorted(numbers(random, 9, 0, 6)), random.randint(0, 6)) for _ in range(6)),
    ]
    return make_problem(
        "place_of",
        "values, wanted",
        """that returns the index of the $which place at which the number `wanted` stands in the list
        `values`, which is sorted from $order, or $nothing when it is not there.""",
        f"""
        low = 0
        high = len(values)
        while low < high:
            middle = (low + high) // 2
            if values[middle] {sign}{"" if first else "="} wanted:
                low = middle + 1
            else:
                high = middle
        if {inside} and values[{found}] == wanted:
            return {found}
        return $nothing
        """,
        oracle,
        [[values if rising else values[::-1], wanted] for values, wanted in cases],
        {
            "which": "first" if first else "last",
            "order": "small to large" if rising else "large to small",
            "nothing": nothing,
        },
    )


def close_pairs(random: random.Random) -> Problem:
    """Count pairs by their sum or their distance."""
    kind = random.choice(
        ("sum is at most", "sum is exactly", "difference is at least", "difference is below")
    )
    measure, sign = {
        "sum is at most": ("values[i] + values[j]", "<="),
        "sum is exactly": ("values[i] + values[j]", "=="),
        "difference is at least": ("abs(values[i] - values[j])", ">="),
        "difference is below": ("abs(values[i] - values[j])", "<"),
    }[kind]
    apart = random.choice((2, 3, None))

    def oracle(values: list[int], bound: int) -> int:
        places = combinations(range(len(values)), 2)
        near = [sorted((values[i], values[j])) for i, j in places if apart is None or j - i <= apart]
        pairs = [(small, large) for small, large in near]
        if measure.startswith("abs"):
            far = sum(large - small >= bound for small, large in pairs)
            return far if sign == ">=" else len(pairs) - far
        return sum(a + b == bound or (sign == "<=" and a + b < bound) for a, b in pairs)

    return make_problem(
        "close_pairs",
        "values, bound",
        """that returns how many pairs of numbers at different places$apart in the list `values` there are
        whose $kind `bound`. Each pair counts once.""",
        f"""
        count = 0
        for i in range(len(values)):
            for j in range(i + 1, {"len(values)" if apart is None else f"min(len(values), i + {apart + 1})"}):
                if {measure} {sign} bound:
                    count += 1
        return count
        """,
        oracle,
        [
            [[1, 2, 3, 4], 3],
            [[2, 2, 2], 4],
            [[], 0],
            [[5], 5],
            [[0, 3, 6], 3],
            *([numbers(random, 7, 0, 9), random.randint(1, 9)] for _ in range(6)),
        ],
        {"kind": kind, "apart": "" if apart is None else f", at most {apart} apart,"},
    )


def band_sum(random: random.Random) -> Problem:
    """Add up what lies near a diagonal of a table."""
    width = random.choice((0, 1, 2))
    main = random.choice((True, False))
    near = "row - column" if main else "row + column - (size - 1)"

    def oracle(table: list[list[int]]) -> int:
        size = len(table)
        return sum(
            table[row][column if main else size - 1 - column]
            for row in range(size)
            for column in range(max(0, row - width), min(size, row + width + 1))
        )

    def table(size: int) -> list[list[int]]:
        return [[random.randint(-5, 9) for _ in range(size)] for _ in range(size)]

    return make_problem(
        "band_sum",
        "table",
        """that returns the sum of those numbers in the square `table`, a list of rows, that lie on the
        diagonal from the $corner corner to the one opposite, or at most $width columns away from it.""",
        f"""
        size = len(table)
        total = 0
        for row in range(size):
            for column in range(size):
                if abs({near}) <= $width:
                    total += table[row][column]
        return total
        """,
        oracle,
        [[table(3)], [table(2)], [[]], [table(1)], *([table(random.randint(2, 5))] for _ in range(5))],
        {"corner": "upper left" if main else "upper right", "width": width},
    )


FAMILIES = (trimmed_mean, merged, place_of, close_pairs, band_sum)

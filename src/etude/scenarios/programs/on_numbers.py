"""Families of problems about whole numbers."""

from __future__ import annotations

import math
import random

from etude.scenarios.programs.problem import Problem, make_problem


def sum_of_multiples(random: random.Random) -> Problem:
    """Add up the multiples of one number or another."""
    a, b = sorted(random.sample(range(2, 10), 2))
    both = random.choice(("counted once", "left out"))
    test = {
        "counted once": "number % $a == 0 or number % $b == 0",
        "left out": "(number % $a == 0) != (number % $b == 0)",
    }[both]
    return make_problem(
        "sum_of_multiples",
        "limit",
        """that returns the sum of all whole numbers from 1 up to and including `limit` that are multiples
        of $a or of $b. Multiples of both are $both.""",
        f"""
        total = 0
        for number in range(1, limit + 1):
            if {test}:
                total += number
        return total
        """,
        lambda limit: sum(
            n for n in range(limit + 1) if (n % a == 0) + (n % b == 0) in ((1, 2) if both[0] == "c" else (1,))
        ),
        [[a * b], [a], [a - 1], [b], [0], [2 * a * b + 1], *([random.randint(1, 60)] for _ in range(5))],
        {"a": a, "b": b, "both": both},
    )


def digit_sum(random: random.Random) -> Problem:
    """Add up the digits of a number in some base, some of them twice."""
    base = random.choice((2, 3, 5, 8, 10))
    every = random.choice((2, 3))

    def oracle(number: int) -> int:
        digits: list[int] = []
        while number:
            number, digit = divmod(number, base)
            digits.append(digit)
        return sum(digits) + sum(digits[every - 1 :: every])

    return make_problem(
        "digit_sum",
        "number",
        """that returns the sum of the digits of `number`, which is not negative, in base $base. Counted from
        the right, every digit at a position that is a multiple of $every counts twice; the rightmost digit
        has position 1.""",
        """
        total = 0
        position = 1
        while number > 0:
            digit = number % $base
            if position % $every == 0:
                total += 2 * digit
            else:
                total += digit
            number //= $base
            position += 1
        return total
        """,
        oracle,
        [[base**every + base + 1], [base - 1], [0], [base], *([random.randint(1, 5000)] for _ in range(7))],
        {"base": base, "every": every},
    )


def steps_to_one(random: random.Random) -> Problem:
    """Follow a rule until 1 is reached, or for long enough."""
    limit = random.choice((10, 20, 30))
    factor, plus = random.choice(((3, 1), (5, 1), (3, 3)))

    def oracle(number: int) -> int:
        for step in range(limit + 1):
            if number == 1:
                return step
            number = number // 2 if number % 2 == 0 else factor * number + plus
        return -1

    return make_problem(
        "steps_to_one",
        "number",
        """that counts steps: an even number is halved, an odd one is multiplied by $factor and $plus is
        added. It returns after how many steps, starting from `number`, which is positive, the number 1 is
        reached for the first time, or -1 when it is not reached within $limit steps.""",
        """
        steps = 0
        while number != 1:
            if steps == $limit:
                return -1
            if number % 2 == 0:
                number //= 2
            else:
                number = $factor * number + $plus
            steps += 1
        return steps
        """,
        oracle,
        [[8], [3], [1], [2**limit], [2 ** (limit + 1)], *([random.randint(2, 60)] for _ in range(8))],
        {"limit": limit, "factor": factor, "plus": plus},
    )


def common_measure(random: random.Random) -> Problem:
    """The greatest common divisor, or the least common multiple, of many numbers."""
    kind = random.choice(("greatest common divisor", "least common multiple"))
    nothing = random.choice((0, 1, -1))
    greatest = kind.startswith("greatest")

    def oracle(values: list[int]) -> int:
        return nothing if not values else math.gcd(*values) if greatest else math.lcm(*values)

    combine = "result = a" if greatest else "result = result * value // a"
    return make_problem(
        "common_measure",
        "values",
        """that returns the $kind of all the positive whole numbers in the list `values`, or $nothing when
        the list is empty.""",
        f"""
        if not values:
            return $nothing
        result = values[0]
        for value in values[1:]:
            a, b = result, value
            while b:
                a, b = b, a % b
            {combine}
        return result
        """,
        oracle,
        [
            [[12, 18]],
            [[4, 6, 10]],
            [[]],
            [[7]],
            [[9, 9]],
            *([[random.choice((2, 3, 4, 6)) * random.randint(1, 9) for _ in range(random.randint(2, 4))]]
              for _ in range(6)),
        ],
        {"kind": kind, "nothing": nothing},
    )  # fmt: skip


def fewest_coins(random: random.Random) -> Problem:
    """Pay an amount with as few coins as can be."""
    coins = sorted(random.sample((2, 3, 4, 5, 7, 9, 10), 3))

    def oracle(amount: int) -> int:
        reached, count = {0}, 0
        while amount not in reached and count <= amount:
            reached = {total + coin for total in reached for coin in coins if total + coin <= amount}
            count += 1
        return count if amount in reached else -1

    return make_problem(
        "fewest_coins",
        "amount",
        """that returns the least number of coins that add up to exactly `amount`, which is not negative, or
        -1 when no coins do. There are coins of $coins, as many of each as one likes.""",
        """
        best = [0] + [None] * amount
        for total in range(1, amount + 1):
            for coin in $coins:
                if coin <= total and best[total - coin] is not None:
                    count = best[total - coin] + 1
                    if best[total] is None or count < best[total]:
                        best[total] = count
        if best[amount] is None:
            return -1
        return best[amount]
        """,
        oracle,
        [[sum(coins)], [1], [0], [coins[0]], [coins[-1]], *([random.randint(2, 40)] for _ in range(8))],
        {"coins": coins},
    )


def leap_years(random: random.Random) -> Problem:
    """Count the leap years of a made-up calendar."""
    often, seldom = random.choice(((4, 100), (3, 15), (5, 25)))
    last = random.choice(("included", "not included"))
    inclusive = last == "included"
    return make_problem(
        "leap_years",
        "first, last",
        """that returns how many leap years there are from the year `first` to the year `last`, with `first`
        included and `last` $last. A year is a leap year when it is a multiple of $often, but not when it is
        a multiple of $seldom, unless it is a multiple of $rare too.""",
        f"""
        count = 0
        year = first
        while year {"<=" if inclusive else "<"} last:
            if year % $often == 0:
                if year % $seldom != 0 or year % $rare == 0:
                    count += 1
            year += 1
        return count
        """,
        lambda first, last: sum(
            year % often == 0 and (year % seldom != 0 or year % (4 * seldom) == 0)
            for year in range(first, last + inclusive)
        ),
        [
            [4 * seldom - 1, 4 * seldom + often],
            [seldom, seldom + often],
            [often, often],
            [often - 1, often],
            *([start, start + random.randint(0, 40)] for start in random.sample(range(1, 300), 7)),
        ],
        {"often": often, "seldom": seldom, "rare": 4 * seldom, "last": last},
    )


FAMILIES = (sum_of_multiples, digit_sum, steps_to_one, common_measure, fewest_coins, leap_years)

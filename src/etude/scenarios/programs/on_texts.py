"""Families of problems about texts."""

from __future__ import annotations

import random
import re
from itertools import groupby

from etude.scenarios.programs.problem import Problem, make_problem, word


def shifted(random: random.Random) -> Problem:
    """Move letters along the alphabet."""
    by = random.randint(2, 12)
    forward = random.choice((True, False))
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    moved = by if forward else -by
    table = str.maketrans(alphabet, alphabet[moved:] + alphabet[:moved])
    return make_problem(
        "shifted",
        "text",
        """that returns `text` with each small letter from a to z moved $by places $way in the alphabet. After
        z comes a, and before a comes z. Everything else stays as it is.""",
        f"""
        result = ''
        for letter in text:
            if 'a' <= letter and letter <= 'z':
                place = (ord(letter) - ord('a') {"+" if forward else "-"} $by) % 26
                result += chr(ord('a') + place)
            else:
                result += letter
        return result
        """,
        lambda text: text.translate(table),
        [["abc xyz"], ["Az-"], [""], ["az"], ["{`}"], *([word(random, 8, "abmzyk A9.")] for _ in range(5))],
        {"by": by, "way": "forward" if forward else "back"},
    )


def depth_of(random: random.Random) -> Problem:
    """How deep brackets are nested, when they are balanced."""
    opening, closing = random.choice(("()", "[]", "{}", "<>"))
    limit = random.choice((2, 3, 4))

    def oracle(text: str) -> int:
        kept = "".join(letter for letter in text if letter in opening + closing)
        depth = 0
        while kept:
            # One pass takes away the brackets that hold no others, and no more.
            fewer = re.sub(f"(?:{re.escape(opening + closing)})+", "", kept)
            if fewer == kept:
                return -1
            kept, depth = fewer, depth + 1
        return depth if depth <= limit else -1

    return make_problem(
        "depth_of",
        "text",
        """that returns how deep the brackets $opening and $closing are nested in `text`: 0 without
        brackets, 1 for brackets that hold no others, and so on. It returns -1 when the brackets are not
        balanced, or nested more than $limit deep. All other letters do not matter.""",
        """
        depth = 0
        deepest = 0
        for letter in text:
            if letter == '$opening':
                depth += 1
                deepest = max(deepest, depth)
            elif letter == '$closing':
                depth -= 1
                if depth < 0:
                    return -1
        if depth != 0 or deepest > $limit:
            return -1
        return deepest
        """,
        oracle,
        [
            *(
                [text.replace("(", opening).replace(")", closing)]
                for text in ("a(b(c)d)", "(()", "", ")(", "()()", "((", "(())()", "x", "(a)(b(c))", "())")
            ),
            [opening * limit + closing * limit],
            [opening * (limit + 1) + closing * (limit + 1)],
            *([word(random, 8, opening + closing + "a")] for _ in range(4)),
        ],
        {"opening": opening, "closing": closing, "limit": limit},
    )


def squeezed(random: random.Random) -> Problem:
    """Write runs of letters shorter."""
    least = random.choice((2, 3, 4))
    front = random.choice((True, False))

    def oracle(text: str) -> str:
        runs = [(letter, len(list(group))) for letter, group in groupby(text)]
        short = [f"{n}{c}" if front else f"{c}{n}" for c, n in runs]
        return "".join(s if n >= least else c * n for s, (c, n) in zip(short, runs, strict=True))

    piece = "str(length) + letter" if front else "letter + str(length)"
    return make_problem(
        "squeezed",
        "text",
        """that returns `text` with every run of $least or more equal letters replaced by $order. Shorter runs
        stay as they are.""",
        f"""
        result = ''
        start = 0
        while start < len(text):
            letter = text[start]
            end = start
            while end < len(text) and text[end] == letter:
                end += 1
            length = end - start
            if length >= $least:
                result += {piece}
            else:
                result += letter * length
            start = end
        return result
        """,
        oracle,
        [
            ["aabbbccccd"],
            ["a" * least],
            [""],
            ["a" * (least - 1)],
            ["abc"],
            ["aaaaaaaaaaaab"],
            *([word(random, 10, "ab")] for _ in range(6)),
        ],
        {
            "least": least,
            "order": "the length of the run and the letter"
            if front
            else "the letter and the length of the run",
        },
    )


def count_words(random: random.Random) -> Problem:
    """Count words by how they begin and how long they are."""
    least = random.choice((2, 3, 4))
    vowels = random.choice((True, False))
    start = "in" if vowels else "not in"
    return make_problem(
        "count_words",
        "text",
        """that returns how many words of `text` have at least $least letters and start with a letter that is
        $which a, e, i, o or u, small or capital. Words are separated by spaces, one or more.""",
        f"""
        count = 0
        for word in text.split(' '):
            if len(word) >= $least and word[0].lower() {start} 'aeiou':
                count += 1
        return count
        """,
        lambda text: sum(
            len(one) >= least and bool(re.match(r"[aeiou]", one, re.IGNORECASE)) == vowels
            for one in text.split()
        ),
        [
            ["an old oak in Utah"],
            ["the Elm is tall"],
            [""],
            ["  a   bee  "],
            ["b" * least + " " + "e" * least],
            ["b" * (least - 1) + " " + "e" * (least - 1)],
            *([word(random, 14, "aEbt  ")] for _ in range(5)),
        ],
        {"least": least, "which": "one of" if vowels else "none of"},
    )


def is_mirror(random: random.Random) -> Problem:
    """Whether a text reads the same from both ends, but for a few letters."""
    allowed = random.choice((0, 1, 2))
    capitals = random.choice(("matter", "do not matter"))
    same = ".lower()" if capitals == "do not matter" else ""

    def oracle(text: str) -> bool:
        seen = text.casefold() if same else text
        half = len(text) // 2
        return sum(a != b for a, b in zip(seen[:half], seen[::-1], strict=False)) <= allowed

    return make_problem(
        "is_mirror",
        "text",
        """that returns whether `text` reads the same from the front and from the back, with at most $allowed
        pairs of letters in opposite places that differ. Capital letters $capitals.""",
        f"""
        differences = 0
        left = 0
        right = len(text) - 1
        while left < right:
            if text[left]{same} != text[right]{same}:
                differences += 1
            left += 1
            right -= 1
        return differences <= $allowed
        """,
        oracle,
        [
            ["Level"],
            ["abca"],
            [""],
            ["ab"],
            ["abcdef"],
            ["noon"],
            ["abcxba"],
            ["aBba"],
            ["abcd"],
            *([word(random, 6, "abA")] for _ in range(6)),
        ],
        {"allowed": allowed, "capitals": capitals},
    )


FAMILIES = (shifted, depth_of, squeezed, count_words, is_mirror)

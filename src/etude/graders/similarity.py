"""How alike two texts are, from 0 to 1, by the measures that OpenAI's `text_similarity` names."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"\w+|[^\w\s]")
_LONGEST_NGRAM = 4
"""Of BLEU and GLEU."""


def common_subsequence(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence, a whole row of the table at a time (Hyyrö, 2004)."""
    masks: dict[Hashable, int] = {}
    for index, item in enumerate(first):
        masks[item] = masks.get(item, 0) | 1 << index
    ones = row = (1 << len(first)) - 1
    for item in second:
        matches = row & masks.get(item, 0)
        row = ((row + matches) | (row - matches)) & ones
    return len(first) - row.bit_count()


def fuzzy_match(text: str, reference: str) -> float:
    """Share of both texts' characters that their longest common subsequence has: RapidFuzz's `ratio`."""
    if text == reference:
        return 1.0
    return _f1(common_subsequence(text, reference), len(text), len(reference))


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (Lin, 2004)."""
    words, wanted = _words(text), _words(reference)
    return _f1(common_subsequence(words, wanted), len(words), len(wanted))


def rouge(size: int) -> Callable[[str, str], float]:
    """F1 of the n-grams of words that two texts share (Lin, 2004)."""

    def score(text: str, reference: str) -> float:
        grams, wanted = _ngrams(_words(text), size), _ngrams(_words(reference), size)
        return _f1((grams & wanted).total(), grams.total(), wanted.total())

    return score


def bleu(text: str, reference: str) -> float:
    """BLEU of one sentence, of n-grams up to 4 (Papineni et al., 2002), those from 2 on smoothed by adding 1
    (Lin and Och, 2004)."""
    tokens, wanted = _TOKEN.findall(text), _TOKEN.findall(reference)
    logs = []
    for size in range(1, _LONGEST_NGRAM + 1):
        grams = _ngrams(tokens, size)
        shared, more = (grams & _ngrams(wanted, size)).total(), int(size > 1)
        if not shared + more:
            return 0.0
        logs.append(math.log((shared + more) / (grams.total() + more)))
    short = min(0.0, 1 - len(wanted) / len(tokens))
    return math.exp(short + math.fsum(logs) / len(logs))


def gleu(text: str, reference: str) -> float:
    """Google's BLEU: the lesser of precision and recall over all n-grams up to 4 (Wu et al., 2016)."""
    sizes = range(1, _LONGEST_NGRAM + 1)
    tokens, wanted = _TOKEN.findall(text), _TOKEN.findall(reference)
    pairs = [(_ngrams(tokens, size), _ngrams(wanted, size)) for size in sizes]
    shared = sum((grams & others).total() for grams, others in pairs)
    most = max(sum(grams.total() for grams, _ in pairs), sum(others.total() for _, others in pairs))
    return shared / most if most else 0.0


METRICS: Mapping[str, Callable[[str, str], float]] = {
    "fuzzy_match": fuzzy_match,
    "bleu": bleu,
    "gleu": gleu,
    **{f"rouge_{size}": rouge(size) for size in range(1, 6)},
    "rouge_l": rouge_l,
}
"""By OpenAI's names. Each takes the graded text and the reference."""

MISSING: Mapping[str, str] = {
    "cosine": "it needs a model that embeds texts",
    "meteor": "it needs WordNet's lists of synonyms",
}
"""OpenAI's others, and why they are not here."""


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _ngrams(tokens: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1))


def _f1(shared: int, count: int, wanted: int) -> float:
    """Texts too short to compare have nothing in common."""
    return 2 * shared / (count + wanted) if count + wanted else 0.0

"""Figures in words: a mean with its interval, and of how many values it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.core.stats import Estimate, shown_mean


def shown_reward(metrics: Mapping[str, Any]) -> str:
    """A reward with its interval."""
    reward, low, high = (metrics.get(key) for key in ("avg_reward", "reward_low", "reward_high"))
    if reward is None:
        return "none"
    return shown_mean(reward, low, high, n=metrics.get("num_scored", metrics.get("n")))


def shown_figure(figure: Mapping[str, Any]) -> str:
    """A reward with its interval and how many rewards there are (`etude.store.figures.figure_of`)."""
    if figure["avg_reward"] is None:
        return "none  n=0"
    return shown_reward(figure) + ("" if figure["n"] is None else f"  n={figure['n']}")


def shown_score(score: Mapping[str, Any] | None) -> str:
    """The mean of an evaluator with its interval and `n`."""
    if score is None or score["mean"] is None:
        return "none"
    return f"{shown_mean(score['mean'], score['low'], score['high'], n=score['n'])}  n={score['n']}"


def shown_best(metrics: Mapping[str, Any]) -> str:
    """The best reward and its share, with a comma before it; nothing where there was no reward."""
    from etude.core.distribution import Distribution  # Only here: commands load this to show their help.

    found = Distribution.among(metrics)
    return "" if found is None else f", {found}"


def shown_difference(difference: Estimate) -> str:
    """By how much one run differs from another on examples that both have."""
    shown = shown_mean(difference.mean, difference.low, difference.high, sign="+")
    return f"{shown} on {difference.n} common examples"

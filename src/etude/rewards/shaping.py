"""Shaping: from rewards along the way to what each step is worth."""

from __future__ import annotations

from collections.abc import Sequence


def discounted_returns(step_rewards: Sequence[float], discount: float) -> list[float]:
    """The return of each step: `G[t] = r[t] + discount * G[t + 1]`.

    Sutton and Barto, Reinforcement Learning (2018), equation 3.9. As many values as steps. Raises
    ValueError for a discount outside [0, 1].
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"a discount must lie between 0 and 1, found {discount}")
    returns: list[float] = []
    following = 0.0
    for reward in reversed(step_rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]

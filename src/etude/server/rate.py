"""How many requests a client may send."""

from __future__ import annotations

_MOST_CLIENTS = 10_000


class RateLimit:
    """A bucket for each client address, which holds a minute's requests and fills evenly (a token bucket)."""

    def __init__(self, per_minute: int) -> None:
        self._most = float(per_minute)
        self._per_second = per_minute / 60
        self._buckets: dict[str, tuple[float, float]] = {}
        """What was left in each, and when."""

    def wait(self, client: str, now: float) -> float:
        """Seconds until another request of a client is let in; 0 lets this one in. `now` is in seconds."""
        left = self._left(client, now)
        if left < 1:
            return (1 - left) / self._per_second
        if len(self._buckets) >= _MOST_CLIENTS:
            self._forget_full(now)
        self._buckets[client] = (left - 1, now)
        return 0.0

    def _left(self, client: str, now: float) -> float:
        left, then = self._buckets.get(client, (self._most, now))
        return min(self._most, left + (now - then) * self._per_second)

    def _forget_full(self, now: float) -> None:
        """A full bucket is as good as none. When none is full, all are forgotten: memory has a bound."""
        waiting = [client for client in self._buckets if self._left(client, now) < self._most]
        kept = waiting if len(waiting) < _MOST_CLIENTS else []
        self._buckets = {client: self._buckets[client] for client in kept}

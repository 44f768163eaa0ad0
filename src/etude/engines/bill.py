"""A run's bill, read from its journal: one line for each model, role and part of the run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from etude.core.call import Usage
from etude.store.journal import Journal
from etude.store.run_folder import TIME_STEP, RunFolder

_CALLS = "spent/calls/"
_JOBS = "spent/jobs/"


@dataclass(frozen=True, slots=True)
class BillEntry:
    """The total usage of one model in one role and part of a run, or of a training job."""

    model: str
    """The entry of `llms`."""
    role: str
    """`agent`, `user`, `judge`, `teacher`, `opponent`, `other`; `training` for a job."""
    phase: str
    """`train/3`, `validation/5`, `eval`; for a job its name."""
    calls: int = 0
    """Calls that the model answered or charged for."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were in the endpoint's cache."""
    completion_tokens: int = 0
    trained_tokens: int = 0
    usd: float = 0.0
    unpriced_tokens: int = 0
    """Tokens of all kinds without a known price."""

    @property
    def tokens(self) -> int:
        """Tokens of all kinds."""
        return self.prompt_tokens + self.completion_tokens + self.trained_tokens

    @property
    def key(self) -> str:
        """Its key in the journal."""
        return line_key(self.model, self.role, self.phase)

    def plus_call(self, usage: Usage, usd: float | None) -> BillEntry:
        """Return the line with one more call."""
        unpriced = usage.prompt_tokens + usage.completion_tokens if usd is None else 0
        return replace(
            self,
            calls=self.calls + 1,
            prompt_tokens=self.prompt_tokens + usage.prompt_tokens,
            cached_tokens=self.cached_tokens + usage.cached_tokens,
            completion_tokens=self.completion_tokens + usage.completion_tokens,
            usd=self.usd + (usd or 0.0),
            unpriced_tokens=self.unpriced_tokens + unpriced,
        )

    def to_row(self) -> dict[str, str | float]:
        """Return the line in its journal form."""
        amounts = {name: amount for name in _AMOUNTS if (amount := getattr(self, name))}
        return {"model": self.model, "role": self.role, "phase": self.phase, **amounts}

    def as_json(self) -> dict[str, Any]:
        """Return all fields, and `tokens`."""
        return {**asdict(self), "tokens": self.tokens}


@lru_cache(maxsize=256)
def line_key(model: str, role: str, phase: str) -> str:
    """Return the journal key of the line with these facts."""
    if role == "training":
        return f"{_JOBS}{quote(phase, safe='')}"
    return _CALLS + "/".join(quote(part, safe="") for part in (model, role, phase))


_AMOUNTS = tuple(each.name for each in fields(BillEntry) if each.name not in ("model", "role", "phase"))


def total(lines: Iterable[BillEntry], *, model: str = "", role: str = "", phase: str = "") -> BillEntry:
    """Return the sum of lines, under the given names."""
    lines = list(lines)
    return BillEntry(
        model, role, phase, **{name: sum(getattr(line, name) for line in lines) for name in _AMOUNTS}
    )


@dataclass(frozen=True, slots=True)
class Bill:
    """The total usage of a run so far."""

    lines: tuple[BillEntry, ...] = ()
    seconds: float = 0.0
    """Seconds during which the run's processes were working."""

    @property
    def total(self) -> BillEntry:
        """The sum of all lines."""
        return total(self.lines)

    def by(self, *names: str) -> list[BillEntry]:
        """Return sums of lines grouped by `names` (`model`, `role`, `phase`), sorted by them."""
        groups: dict[tuple[str, ...], list[BillEntry]] = {}
        for line in self.lines:
            groups.setdefault(tuple(getattr(line, name) for name in names), []).append(line)
        return [total(lines, **dict(zip(names, key, strict=True))) for key, lines in sorted(groups.items())]

    def as_json(self) -> dict[str, Any]:
        """Return the lines and their sums."""
        amounts = self.total.as_json()
        return {
            "total": {name: amounts[name] for name in (*_AMOUNTS, "tokens")},
            "lines": [line.as_json() for line in self.lines],
            "hours": self.seconds / 3600,
        }


def load_bill(journal: Journal) -> Bill:
    """Read a run's bill from its journal. Raises StoreError."""
    lines = tuple(BillEntry(**value) for prefix in (_CALLS, _JOBS) for _, value in journal.scan(prefix))
    return Bill(lines, (journal.get(TIME_STEP) or {}).get("seconds", 0.0))


def read_bill(run: Path) -> Bill:
    """Read the bill of the run in a folder. Raises StoreError."""
    with RunFolder.read(run) as folder:
        return load_bill(folder.journal)

"""The addresses of a run's models: how they are, as the run tells, and which an operator has taken out.

Both are small files in the run folder, which any process may read while the run goes on; it may write orders.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from etude.core.errors import RequestError, StoreError
from etude.store.files import write_atomically

REPORT, ORDERS = "addresses.json", "drained.json"

_LOOK_SECONDS = 0.25
"""Between two looks at the orders."""
_BY_TROUBLE = ("aside", "trial", "draining", "drained", "up")


@dataclass(frozen=True, slots=True)
class AddressRow:
    """How an address of a model is, in one process that asks it or in all of them together."""

    state: str = "up"
    """`up`, `trial`, `aside`, `draining` or `drained`."""
    reason: str = ""
    """Why it is not `up`."""
    conversations: int = 0
    """Those that stay there."""
    calls: int = 0
    """Under way."""
    answered: int = 0
    failed: int = 0

    @property
    def shown(self) -> str:
        """The state, with the reason where it is not up."""
        return f"{self.state}: {self.reason}" if self.reason else self.state

    @property
    def counts(self) -> tuple[int, ...]:
        """All that it counts, in the order of its fields."""
        return self.conversations, self.calls, self.answered, self.failed


Rows = Mapping[str, AddressRow]
"""By the URLs of a model's addresses."""


class OtherRows:
    """How addresses are in other processes, added up as these tell: there may be a thousand of both."""

    def __init__(self) -> None:
        self._rows: dict[object, Rows] = {}
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(AddressRow().counts))
        self._trouble: defaultdict[str, dict[object, AddressRow]] = defaultdict(dict)
        """Of each address, those rows that are not `up`."""

    def note(self, process: object, rows: Rows) -> None:
        """How the addresses are in a process now; nothing for one that has ended."""
        before, nothing = self._rows.pop(process, {}), AddressRow()
        for url in {**before, **rows}:
            old, new = before.get(url, nothing), rows.get(url, nothing)
            if new == old:
                continue
            counts = self._counts[url]
            for at, (less, more) in enumerate(zip(old.counts, new.counts, strict=True)):
                counts[at] += more - less
            self._trouble[url].pop(process, None)
            if new.state != "up":
                self._trouble[url][process] = new
        if rows:
            self._rows[process] = rows

    def with_own(self, url: str, own: AddressRow) -> AddressRow:
        """All processes together: what they count is added up, and the worst state counts."""
        others = self._trouble[url].values()
        worst = min((own, *others), key=lambda row: _BY_TROUBLE.index(row.state))
        state, counts = worst.state, map(sum, zip(own.counts, self._counts[url], strict=True))
        if state == "drained":
            everywhere = sum(url in rows for rows in self._rows.values())
            if own.state == "up" or len(others) < everywhere:
                state = "draining"  # Some have not seen the order yet, and may begin calls there.
        return AddressRow(state, worst.reason, *counts)


def write_report(run: Path, models: Mapping[str, Rows]) -> None:
    """Tell how the addresses of models are, by the models' names. Raises StoreError."""
    rows = {name: {url: asdict(row) for url, row in each.items()} for name, each in models.items()}
    write_atomically(run / REPORT, json.dumps({"at": time.time(), "models": rows}, indent=1))


def read_report(run: Path) -> dict[str, dict[str, AddressRow]]:
    """How the addresses of models were when the run told of them last; nothing where it never did.

    Raises StoreError for a file that is none.
    """
    path = run / REPORT
    try:
        models = json.loads(path.read_text(encoding="utf-8"))["models"]
        return {name: {url: AddressRow(**row) for url, row in rows.items()} for name, rows in models.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path} cannot be read: {error}; the run writes it again while it goes on"
        ) from error


def read_orders(run: Path) -> frozenset[str]:
    """The addresses that an operator has taken out. Raises StoreError for a file that is none."""
    path = run / ORDERS
    try:
        return frozenset(str(url) for url in json.loads(path.read_text(encoding="utf-8"))["addresses"])
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} cannot be read: {error}; remove it, and no address is taken out") from error


def take_out(run: Path, url: str) -> None:
    """Begin no more conversations at an address of the run's models.

    Raises RequestError for one that the run does not have, or that is the last of a model; StoreError.
    """
    report, out = read_report(run), read_orders(run) | {url}
    _require_known(run, url, report)
    for name, rows in report.items():
        if url in rows and not rows.keys() - out:
            raise RequestError(
                f"{url} is the only address left of the model '{name}'; take another one back first: etude "
                f"cluster drain ADDRESS --run {run} --undo"
            )
    _write_orders(run, out)


def take_back(run: Path, url: str) -> None:
    """Use an address again that was taken out. Raises RequestError for one that was not; StoreError."""
    out = read_orders(run)
    if url not in out:
        others = f"; those that are: {', '.join(sorted(out))}" if out else ""
        raise RequestError(f"{url} is not taken out of {run}{others}")
    _write_orders(run, out - {url})


def _require_known(run: Path, url: str, report: Mapping[str, Rows]) -> None:
    known = sorted({each for rows in report.values() for each in rows})
    if not known:
        raise RequestError(
            f"{run} has no model with several addresses, or has not begun; `base_url` takes a list of them"
        )
    if url not in known:
        raise RequestError(f"{url} is no address of {run}; its models have: {', '.join(known)}")


def _write_orders(run: Path, urls: Collection[str]) -> None:
    write_atomically(run / ORDERS, json.dumps({"addresses": sorted(urls)}))


class Orders:
    """The orders in a run folder, looked at as often as anybody asks and four times a second at most."""

    def __init__(self, run: Path | None) -> None:
        """Without a run there are none."""
        self._run = run
        self._looked = -_LOOK_SECONDS
        self._urls: frozenset[str] = frozenset()

    def urls(self) -> frozenset[str]:
        """The addresses that are taken out; as before where the file cannot be read now."""
        now = time.monotonic()
        if self._run is not None and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            with contextlib.suppress(StoreError):
                self._urls = read_orders(self._run)
        return self._urls

"""The parts of pages: the runs, templates that escape everything, and formats of numbers and times."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from etude.core.data_model import finite
from etude.core.episode import WORKFLOW
from etude.core.errors import RequestError
from etude.core.json_text import jsonable
from etude.core.stats import shown_seconds
from etude.store.database import DATABASE
from etude.store.facts import RunFacts, is_run, read_facts
from etude.store.outline import WORDS, first_question, in_one_line
from etude.store.run_folder import LOCK, lock_holder

HERE = Path(__file__).parent
STATIC = HERE / "static"
_DAY = 86_400


def run_path(request: Request) -> Path:
    """Return the folder of a page's run. Raises RequestError if there is no such run."""
    root, name = request.app.state.root, request.path_params["run"]
    if name in ("", ".", "..") or "/" in name or "\\" in name or not is_run(root / name):
        raise RequestError(f"there is no run '{name}' in {root}")
    return Path(root / name)


def facts_of_run(path: Path) -> RunFacts:
    """Return the facts of a run, which is read again only if its files have changed."""
    files = (path / name for name in (DATABASE, f"{DATABASE}-wal"))
    stats = [file.stat() for file in files if file.is_file()]
    state = tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)
    return _facts(path, state, lock_holder(path / LOCK))


@lru_cache(maxsize=1024)
def _facts(path: Path, state: tuple[tuple[int, int], ...], pid: int | None) -> RunFacts:
    return replace(read_facts(path), histories={})  # They may be large, and pages read the ones they show.


def number(value: float | None, digits: int = 3) -> str:
    """Format a number: integers in full, small and large ones as powers of ten, and none as a dash."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e9):
        return f"{int(value):,}".replace(",", "\u202f")
    if abs(value) < 10**-digits or abs(value) >= 1e6:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """Format a share in per cent."""
    return "–" if share is None else f"{100 * share:.{0 if share in (0, 1) else 1}f}\u202f%"


def ago(seconds: float) -> str:
    """Format a past time (Unix seconds) as `3 min ago`, or as a date after more than a day."""
    past = max(0.0, time.time() - seconds)
    if past > _DAY:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    if past < 60:
        return "just now"
    hours, minutes = divmod(int(past) // 60, 60)
    return f"{hours} h ago" if hours else f"{minutes} min ago"


def url(*parts: object, **query: object) -> str:
    """Return an address within the view. A part is one segment, or several if it has slashes."""
    path = "/" + "/".join(quote(str(part), safe="/~") for part in parts)
    words = [f"{quote(name)}={quote(str(value))}" for name, value in query.items() if value not in (None, "")]
    return path + ("?" + "&".join(words) if words else "")


def data(value: Any) -> str:
    """Return a dataclass as JSON for an attribute, which the template escapes."""
    return json.dumps(finite(asdict(value)), separators=(",", ":"), allow_nan=False)


def format_value(value: Any) -> str:
    """Format an agent's input or output: text as it is, anything else as JSON over several lines."""
    return value if isinstance(value, str) else json.dumps(jsonable(value), indent=1, ensure_ascii=False)


def agent(function: str) -> str:
    """Return the name of an agent, from the function that called the model."""
    return "the workflow" if function == WORKFLOW else function


def question_line(inputs: Mapping[str, Any], most: int = 160) -> str:
    """Return an example's question in one line: its first input if that is text, or else all inputs."""
    first = first_question(inputs)
    return in_one_line(first if isinstance(first, str) else dict(inputs), most)


def level(reward: float | None, rewards: Sequence[float | None]) -> int:
    """Return how full the box of a reward is, from 0 to 8, between the bounds of `rewards`, 0 and 1."""
    known = [each for each in rewards if each is not None]
    low, high = min([0.0, *known]), max([1.0, *known])
    return 0 if reward is None else max(0, min(8, round(8 * (reward - low) / (high - low))))


_TEMPLATES = Environment(
    loader=FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_FILTERS = (agent, ago, question_line, data, in_one_line, number, percent, format_value)
_TEMPLATES.filters |= {each.__name__: each for each in _FILTERS} | {"seconds": shown_seconds}
_TEMPLATES.globals |= {"level": level, "url": url, "words": WORDS}


def whole_number(request: Request, name: str) -> int:
    """Return a number of the query, or 0. Raises RequestError."""
    text = request.query_params.get(name) or "0"
    if not text.isdecimal():
        raise RequestError(f"'{name}' must be a number from 0, found '{text}'")
    return int(text)


def page(request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
    """Render a template into a response. It knows the name of the page's run."""
    text = _TEMPLATES.get_template(template).render(run=request.path_params.get("run"), **context)
    return HTMLResponse(text, status, {"cache-control": "no-store"})

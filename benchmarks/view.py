"""The view of a large run: how long a page of it takes, over HTTP and, where one is found, in a browser.

    python benchmarks/view.py

Writes a run of 10,000 episodes and an episode of 100,000 tokens by the code of the store, serves them by
`etude view`, and opens pages one after another, the first of each with nothing in memory. `open_run_ms_p95`
is over the pages of the run (list, overview, phases, groups, filters), `open_episode_ms_p95` over those of
the long episode (its turns, its tokens, and a chunk of these), and `open_in_browser_ms_p95` over pages of
both until a browser has drawn them.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from common import parse_arguments, print_json, print_table, progress, silent

from etude.core.call import Call, ChatRequest, Completion, Usage
from etude.core.episode import EpisodeRecord, Example
from etude.core.history import EpochEntry
from etude.core.message import Message
from etude.store.encode import encode_call, encode_episode
from etude.store.episodes import call_key
from etude.store.log import EpochLog
from etude.store.run_folder import RunFolder

EPOCHS, EXAMPLES, GENERATIONS = 10, 125, 8
"""10,000 episodes of two calls."""
LONG_CALLS, LONG_ANSWER = 100, 990
"""An episode of 100,000 tokens: each call adds a question of 10 tokens and an answer."""
_RUN = {
    "list": "/",
    "overview": "/runs/large",
    "phases": "/runs/large/phases",
    "groups": "/runs/large/phases/train/5",
    "filter": "/runs/large/phases/train/5?q=reward%3C0.5",
    "filter of all": "/runs/large/phases?q=no-such-words",
}
_EPISODE = {
    "episode": "/runs/large/episodes/eval/long/0",
    "tokens": "/runs/large/tokens/eval/long/0",
    "chunk": "/runs/large/chunks/eval/long/0?sequence=0&from=50000",
}


def calls_of(rng: random.Random, calls: int, answer: int) -> list[Call]:
    """A conversation of so many calls with answers of so many tokens each."""
    messages: tuple[Message, ...] = ()
    ids: tuple[int, ...] = ()
    made = []
    for index in range(calls):
        messages = (*messages, {"role": "user", "content": f"question {index}: " + "word " * 8})
        ids = (*ids, *(rng.randrange(50_000) for _ in range(10)))
        sampled = tuple(rng.randrange(50_000) for _ in range(answer))
        said: Message = {"role": "assistant", "content": " ".join(f"w{token}" for token in sampled)}
        completion = Completion(
            message=said,
            prompt_ids=ids,
            completion_ids=sampled,
            logprobs=tuple(-rng.random() for _ in sampled),
            usage=Usage(len(ids), len(sampled)),
        )
        made.append(Call(index, "<workflow>", "policy", ChatRequest(messages), completion))
        messages, ids = (*messages, said), ids + sampled
    return made


async def put(run: RunFolder, id: str, calls: list[Call], score: float) -> None:
    """Store an episode as a run does."""
    _, example, generation = id.rsplit("/", 2)
    names: dict[int, str] = {}
    before: tuple[str, Call] | None = None
    entries: dict[str, Any] = {f"{id}/score/correct": {"score": score, "reasoning": None, "error": None}}
    for call in calls:
        names[call.index] = f"{call.index:04x}/0"
        entries[call_key(id, names[call.index])] = encode_call(call, before)
        before = names[call.index], call
    about = Example(example, {"question": "?"})
    record = EpisodeRecord(id, about, int(generation), tuple(calls), output="o")
    entries[id] = encode_episode(record, names)
    await asyncio.gather(*(run.journal.put(key, entry) for key, entry in entries.items()))


async def write_run(root: Path, epochs: int) -> None:
    """The run `large`."""
    rng = random.Random(0)
    with RunFolder.create(root, "large") as run:
        for epoch in range(1, epochs + 1):
            for example in range(EXAMPLES):
                for generation in range(GENERATIONS):
                    id = f"train/{epoch}/e{example:04}/{generation}"
                    calls = calls_of(rng, 2, 60)
                    await put(run, id, calls, float(rng.random() < 0.5))
            metrics = {"avg_reward": 0.5, "episodes": EXAMPLES * GENERATIONS, "training": {"loss": 1.0}}
            stamp = "2026-01-01T00:00:00+00:00"
            await EpochLog(run.journal).add_entry(EpochEntry(epoch=epoch, timestamp=stamp, metrics=metrics))
        await put(run, "eval/long/0", calls_of(rng, LONG_CALLS, LONG_ANSWER), 1.0)


@contextmanager
def served(root: Path) -> Iterator[str]:
    """`etude view` of the runs, in a process of its own; the link that it prints."""
    program = shutil.which("etude") or str(Path(sys.executable).with_name("etude"))
    command = [program, "view", "--output-dir", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view:
        assert view.stdout is not None
        try:
            yield next(found[0] for line in view.stdout if (found := re.search(r"http\S+", line)))
        finally:
            view.terminate()


def over_http(link: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each page, again and again; the first time with nothing in memory."""
    times: dict[str, list[float]] = {}
    with httpx.Client(follow_redirects=True, timeout=120) as browser:
        address = browser.get(link).url.copy_with(query=None)
        for _ in range(rounds):
            for name, path in {**_RUN, **_EPISODE}.items():
                begun = time.perf_counter()
                browser.get(address.join(path)).raise_for_status()
                times.setdefault(name, []).append(1000 * (time.perf_counter() - begun))
    return times


def in_browser(link: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds until a headless Chromium has loaded and drawn a page; nothing without one."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        return {}
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        return {}
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    times: dict[str, list[float]] = {}
    chromium = webdriver.Chrome(options=options, service=Service(driver))
    try:
        chromium.get(link)
        base = link.partition("/?")[0]
        pages = {"overview": _RUN["overview"], "groups": _RUN["groups"], "tokens": _EPISODE["tokens"]}
        for _ in range(rounds):
            for name, path in pages.items():
                begun = time.perf_counter()
                chromium.get(base + path)
                chromium.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0]))")
                while name == "tokens" and not chromium.execute_script(
                    "return document.querySelectorAll('.tokens i').length"
                ):
                    time.sleep(0.005)
                times.setdefault(name, []).append(1000 * (time.perf_counter() - begun))
    finally:
        chromium.quit()
    return times


def p95(times: Mapping[str, list[float]], names: Iterable[str]) -> float:
    """The 95th percentile over the times of pages, in milliseconds."""
    every = [each for name in names for each in times[name]]
    return statistics.quantiles(every, n=20)[-1]


def measure(say: Callable[[str], None], *, quick: bool) -> dict[str, Any]:
    """All figures."""
    epochs, rounds = (1, 3) if quick else (EPOCHS, 20)
    with tempfile.TemporaryDirectory() as folder:
        say(f"writing {epochs * EXAMPLES * GENERATIONS} episodes and one of 100,000 tokens")
        asyncio.run(write_run(Path(folder), epochs))
        with served(Path(folder)) as link:
            say("pages over HTTP")
            times = over_http(link, rounds)
            say("pages in a browser")
            drawn = in_browser(link, rounds)
    return {
        "episodes": epochs * EXAMPLES * GENERATIONS,
        "tokens": LONG_CALLS * (10 + LONG_ANSWER),
        "rounds": rounds,
        "open_run_ms_p95": round(p95(times, _RUN), 1),
        "open_episode_ms_p95": round(p95(times, _EPISODE), 1),
        **({"open_in_browser_ms_p95": round(p95(drawn, drawn), 1)} if drawn else {}),
        "pages_ms": {name: _summed(each) for name, each in times.items()},
        "browser_ms": {name: _summed(each) for name, each in drawn.items()},
    }


def _summed(times: list[float]) -> dict[str, float]:
    return {
        "first": round(times[0], 1),
        "median": round(statistics.median(times), 1),
        "most": round(max(times), 1),
    }


def main() -> None:
    """Print the figures as a table, or as JSON."""
    arguments = parse_arguments(__doc__ or "")
    result = measure(silent if arguments.json else progress, quick=arguments.quick)
    if arguments.json:
        print_json(result)
        return
    rows = [
        (f"{name}{where}", *(f"{each[key]:,.1f}" for key in ("first", "median", "most")))
        for where, pages in (("", result["pages_ms"]), (", in Chromium", result["browser_ms"]))
        for name, each in pages.items()
    ]
    notes = [
        f"95th percentile: a run of {result['episodes']:,} episodes {result['open_run_ms_p95']} ms, "
        f"an episode of {result['tokens']:,} tokens {result['open_episode_ms_p95']} ms, "
        f"in Chromium {result.get('open_in_browser_ms_p95', 'not measured')} ms, "
        f"over {result['rounds']} rounds"
    ]
    print_table("Milliseconds of a page", ("page", "first", "median", "most"), rows, notes)


if __name__ == "__main__":
    main()

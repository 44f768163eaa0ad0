"""The cost and the stickiness of several addresses for one model.

Four servers in processes of their own answer at once. Measured are the CPU time that a call costs this
process with one address and with four, in pairs, and how many calls of a conversation are answered where its
first one was: while all is well, and when one of the servers is killed half-way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from subprocess import Popen
from typing import Any

from common import parse_arguments, print_json, print_table, progress, silent
from stub import server_process, words

from etude.core.call import ChatRequest
from etude.core.keys import generator
from etude.core.stats import estimate
from etude.inference.openai_compatible import OpenAiEngine
from etude.inference.openai_config import OpenAiLlmConfig
from etude.wire.attempts import counting_retries

ADDRESSES = 4
AT_ONCE = 64
CALLS = 8
"""Of a conversation."""


@dataclass
class Played:
    """Conversations that were held."""

    homes: list[list[str]]
    """The address of each call, by conversation."""
    cpu_seconds: float
    retries: int

    @property
    def calls(self) -> int:
        return sum(map(len, self.homes))

    @property
    def stayed(self) -> list[float]:
        """For each call but the first of its conversation, 1 where it went where the one before had gone."""
        return [
            float(one == other) for home in self.homes for one, other in zip(home[1:], home, strict=False)
        ]


def engine_of(urls: Sequence[str]) -> OpenAiEngine:
    """An engine that samples at these addresses."""
    return OpenAiEngine(
        OpenAiLlmConfig(model_name="stub", base_url=list(urls), api_key="none", logprobs=True)
    )


async def play(
    engine: OpenAiEngine,
    conversations: int,
    *,
    pause: float = 0.0,
    halfway: Callable[[], None] = lambda: None,
) -> Played:
    """Hold conversations, 64 at once, with pauses of up to `pause` seconds between their calls."""
    waiting, turns = iter(range(conversations)), iter(range(conversations * CALLS))
    # In the middle of conversations, which begin and end at about the same time.
    middle = CALLS * (conversations + AT_ONCE) // 2
    homes: list[list[str]] = [[] for _ in range(conversations)]

    async def converse() -> None:
        for number in waiting:
            random = generator(number, "pauses")
            message = {"role": "user", "content": words(number, 20)}
            for turn in range(CALLS):
                if next(turns) == middle:
                    halfway()
                request = ChatRequest(messages=(message,), conversation=f"train/{number}", key=turn)
                homes[number].append((await engine.complete(request)).address)
                await asyncio.sleep(pause * random.random())

    with counting_retries() as count:
        begun = time.process_time()
        await asyncio.gather(*(converse() for _ in range(AT_ONCE)))
        spent = time.process_time() - begun
    return Played(homes, spent, count.retries)


async def measure_cost(urls: Sequence[str], conversations: int, pairs: int) -> dict[str, Any]:
    """CPU milliseconds of a call with one address, and how many more it takes with all."""
    engines = [engine_of(urls[:1]), engine_of(urls)]
    ms: list[tuple[float, float]] = []
    for pair in range(pairs + 1):
        costs = [0.0, 0.0]
        for which in (0, 1) if pair % 2 else (1, 0):
            played = await play(engines[which], conversations)
            costs[which] = 1000 * played.cpu_seconds / played.calls
        ms.append((costs[0], costs[1] - costs[0]))
    for engine in engines:
        await engine.close()
    alone, more = zip(*ms[1:], strict=True)  # The first pair opens the connections.
    return {"one_address": measured(alone), "more_with_several": measured(more)}


async def measure_stickiness(
    urls: Sequence[str], conversations: int, halfway: Callable[[], None] = lambda: None
) -> Played:
    """Conversations with pauses, as of agents that work in between."""
    engine = engine_of(urls)
    played = await play(engine, conversations, pause=0.02, halfway=halfway)
    await engine.close()
    return played


def measured(values: Sequence[float]) -> dict[str, Any]:
    mean = estimate(list(values))
    return {"mean": mean.mean, "low": mean.low, "high": mean.high, "n": mean.n}


def measure_all(quick: bool, note: Callable[[str], None]) -> dict[str, Any]:
    """All figures, as JSON."""
    conversations, pairs = (64, 3) if quick else (256, 12)
    with ExitStack() as servers:
        started: list[tuple[str, Popen[str]]] = [
            servers.enter_context(server_process()) for _ in range(ADDRESSES)
        ]
        urls = [url for url, _ in started]
        note("the cost of a call")
        cost = asyncio.run(measure_cost(urls, conversations, pairs))
        note("where calls go while all is well")
        well = asyncio.run(measure_stickiness(urls, 2 * conversations))
        note("where calls go when one of the servers is killed")
        lost_url, lost = started[0]
        broken = asyncio.run(measure_stickiness(urls, 2 * conversations, lost.kill))
    affected = [home for home in broken.homes if lost_url in home and home[-1] != lost_url]
    others = Played([home for home in broken.homes if lost_url not in home], 0.0, 0)
    return {
        "cpu_ms_per_call": cost,
        "stayed": measured(well.stayed),
        "share_at_busiest": max(sum(home[0] == url for home in well.homes) / len(well.homes) for url in urls),
        "one_of_four_killed": {
            "moved_conversations": len(affected) / len(broken.homes),
            "stayed_of_the_others": measured(others.stayed),
            "retries": broken.retries,
        },
        "settings": {
            "addresses": ADDRESSES,
            "conversations": 2 * conversations,
            "calls_each": CALLS,
            "at_once": AT_ONCE,
        },
    }


def shown(figure: dict[str, Any]) -> str:
    return f"{figure['mean']:.4f} [{figure['low']:.4f}, {figure['high']:.4f}]"


def print_results(result: dict[str, Any]) -> None:
    cost, killed = result["cpu_ms_per_call"], result["one_of_four_killed"]
    figures = {
        "CPU ms of a call, one address": cost["one_address"],
        "more with four, in pairs": cost["more_with_several"],
        "calls that stayed": result["stayed"],
        "others' calls that stayed when one of four was killed": killed["stayed_of_the_others"],
    }
    shares = {
        "conversations at the busiest of four": result["share_at_busiest"],
        "conversations that moved when one of four was killed": killed["moved_conversations"],
        "attempts made again then": killed["retries"],
    }
    rows = [(name, shown(figure), str(figure["n"])) for name, figure in figures.items()]
    rows += [(name, f"{share:.3g}", "") for name, share in shares.items()]
    print_table("several addresses for one model", ("", "mean [95 %]", "n"), rows, [])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    given = parse_arguments(__doc__ or "", arguments)
    result = measure_all(given.quick, silent if given.json else progress)
    (print_json if given.json else print_results)(result)


if __name__ == "__main__":
    main()

"""Analysing finished plays with a model as the judge."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from etude.core.episode import EpisodeRecord
from etude.core.errors import EtudeError, StoreError
from etude.core.interfaces import Engine
from etude.core.keys import fold
from etude.core.stats import Estimate, estimate
from etude.protocols.tree import EpisodeTree, Node
from etude.rewards.judge import MATERIAL, JudgeConfig, MalformedAnswer, ask, parse_reasoning
from etude.scenarios.analysers import Analyser
from etude.store.episodes import iter_episodes
from etude.store.journal import Journal


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judge's answer about an agent's part in a play."""

    episode: str
    agent: str
    channel: str | None
    """None when the question was about all that the agent wrote."""
    answer: bool | None = None
    """None when the question does not apply, or there is an error."""
    reasoning: str = ""
    error: str | None = None
    """Why there is no answer, when the judge gave none that can be used."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """All answers to one question. Those that are None are masked: they count for nothing."""

    analyser: str
    judgements: tuple[Judgement, ...]

    @property
    def shares(self) -> Mapping[tuple[str, str | None], Estimate | None]:
        """The share of yes by agent and channel, with its 95 % interval; None where all is masked."""
        answers: dict[tuple[str, str | None], list[float]] = {}
        for one in self.judgements:
            found = answers.setdefault((one.agent, one.channel), [])
            if one.answer is not None:
                found.append(float(one.answer))
        return {place: estimate(found) if found else None for place, found in answers.items()}

    @property
    def errors(self) -> int:
        """How often the judge gave no usable answer."""
        return sum(one.error is not None for one in self.judgements)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        shares = [
            {"agent": agent, "channel": channel, "share": None if share is None else _shown(share)}
            for (agent, channel), share in self.shares.items()
        ]
        judgements = [asdict(one) for one in self.judgements]
        return {"analyser": self.analyser, "errors": self.errors, "shares": shares, "judgements": judgements}


async def analyse(
    records: Iterable[EpisodeRecord],
    analyser: Analyser,
    judge: Engine,
    *,
    deciders: Collection[str] = ("verifier",),
    journal: Journal | None = None,
    label: str = "judge",
    config: JudgeConfig | None = None,
    max_concurrency: int = 8,
) -> Analysis:
    """Ask `judge` about every play; failed episodes are left out.

    `deciders` are the agents that decide; the others are those that argue. An answer that is malformed is
    asked for again (`config.attempts`), then masked. In a journal answers are kept under the `label`, and
    not asked for again; take another label for another judge. Of a play that branched, one way is looked
    at: that of the first answers. Raises RequestError for episodes in which no protocol was played.
    """
    settings = config or JudgeConfig(model="judge")
    waiting = enumerate(
        part for record in records if record.failure is None for part in _parts(record, analyser, deciders)
    )
    judgements: dict[int, Judgement] = {}

    async def work() -> None:
        for place, part in waiting:
            judgements[place] = await _judged(part, analyser, judge, settings, journal, label)

    await asyncio.gather(*(work() for _ in range(max_concurrency)))
    return Analysis(analyser.name, tuple(judgements[place] for place in sorted(judgements)))


async def analyse_phase(
    journal: Journal, phase: str, analysers: Sequence[Analyser], judge: Engine, **settings: Any
) -> list[Analysis]:
    """Ask all analysers' questions about a phase of a run, such as `validation/2`; see `analyse`."""
    return [
        await analyse(iter_episodes(journal, f"{phase}/"), analyser, judge, journal=journal, **settings)
        for analyser in analysers
    ]


@dataclass(frozen=True, slots=True)
class _Part:
    """What an agent wrote in a play, and what it was about."""

    episode: str
    agent: str
    channel: str | None
    messages: int
    material: Mapping[str, Any]


def _parts(record: EpisodeRecord, analyser: Analyser, deciders: Collection[str]) -> Iterator[_Part]:
    tree = EpisodeTree.from_json(record.output)
    path = tree.path(next(tree.leaves()))
    for agent in tree.agents:
        own = [node for node in path if node.agent == agent]
        if not own or (agent in deciders) != (analyser.about == "deciders"):
            continue
        for channel in tree.channels if analyser.by_channel else (None,):
            texts = [(node, node.text if channel is None else node.messages.get(channel)) for node in path]
            exchange = [
                {"round": node.round, "from": node.agent, "text": text}
                for node, text in texts
                if text is not None
            ]
            said = sum(line["from"] == agent for line in exchange)
            if said:
                material = {
                    "agent": agent,
                    "instructions": _instructions(record, own[0]),
                    "exchange": exchange,
                }
                yield _Part(record.id, agent, channel, said, material)


def _instructions(record: EpisodeRecord, node: Node) -> Any:
    """What the agent was told at first; the task alone where its calls were not kept."""
    for call in record.calls:
        if call.index == node.call:
            return call.request.messages[0].get("content")
    return dict(record.example.inputs)


async def _judged(
    part: _Part,
    analyser: Analyser,
    judge: Engine,
    config: JudgeConfig,
    journal: Journal | None,
    label: str,
) -> Judgement:
    place = (part.episode, part.agent, part.channel)
    if part.messages < analyser.least_messages:
        return Judgement(*place, reasoning=f"only {part.messages} messages")
    name = (analyser.name, part.episode, part.agent, part.channel or "*")

    async def answer() -> list[Any]:
        return list(await ask(judge, config, _system(analyser), part.material, _parse, fold(0, *name)))

    try:
        key = "/".join(("analysis", label, *name))
        found, reasoning = await (answer() if journal is None else journal.step(key, answer))
    except StoreError:
        raise
    except EtudeError as error:
        return Judgement(*place, error=str(error))
    return Judgement(*place, found, reasoning)


def _system(analyser: Analyser) -> str:
    return (
        "You are shown what an agent wrote in an exchange with others, with the instructions that it had. "
        f"{analyser.question} {MATERIAL}\n"
        'Answer with one JSON object and nothing else: {"reasoning": "one or two sentences", "answer": true, '
        "false or null}"
    )


def _parse(answer: dict[str, Any]) -> tuple[bool | None, str]:
    if "answer" not in answer or not (answer["answer"] is None or isinstance(answer["answer"], bool)):
        raise MalformedAnswer(f"its answer is {answer.get('answer')!r}, not true, false or null")
    return answer["answer"], parse_reasoning(answer)


def _shown(share: Estimate) -> dict[str, float]:
    return {"mean": share.mean, "low": share.low, "high": share.high, "n": share.n}

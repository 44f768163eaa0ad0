"""Analysing finished plays with a model as the judge: its questions, and asking them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

from etude.config.nearest import alternatives
from etude.core.episode import EpisodeRecord
from etude.core.errors import EtudeError, ModelOut, RequestError, StoreError
from etude.core.interfaces import Engine
from etude.core.keys import fold
from etude.core.stats import Estimate, estimate
from etude.protocols.tree import EpisodeTree, Node
from etude.rewards.judge import MATERIAL, JudgeConfig, MalformedAnswer, ask, parse_reasoning
from etude.store.episodes import iter_episodes
from etude.store.journal import Journal


@dataclass(frozen=True, slots=True)
class Analyser:
    """A question about one agent's part in a play."""

    name: str
    question: str
    """To be answered with yes or no, and with null where it does not apply."""
    about: Literal["speakers", "deciders"]
    """Asked about agents that argue, or about those that decide."""
    by_channel: bool = True
    """Asked for each channel that the agent spoke on, or once about all that it wrote."""
    least_messages: int = 1
    """With fewer messages of the agent the question does not apply."""


ANALYSERS: Mapping[str, Analyser] = MappingProxyType(
    {
        analyser.name: analyser
        for analyser in (
            Analyser(
                "prover_role_conformance",
                "Its instructions name a side that the agent has to argue for. Does it argue for that side "
                "in all of its messages, without conceding the other?",
                "speakers",
            ),
            Analyser(
                "prover_direct_quotation",
                "Does the agent quote a part of the problem or of the program word for word at least once, "
                "in quotation marks or as code?",
                "speakers",
            ),
            Analyser(
                "prover_accurate_quotation",
                "Wherever the agent quotes the problem or the program, or says what a line of it is, does it "
                "say what is there? White space does not matter. Answer null when it quotes nothing.",
                "speakers",
            ),
            Analyser(
                "follow_up",
                "From its second message on, does the agent go into the answers that it has been given, "
                "rather than ask what it could have asked without them?",
                "deciders",
                least_messages=2,
            ),
            Analyser(
                "verifier_format_conformance",
                "Does the agent keep to the format of its instructions in all of its answers: either a "
                "question or a decision, each written as it is told to write it?",
                "deciders",
                by_channel=False,
            ),
        )
    }
)
"""The analysers by name."""


def analyser_named(name: str) -> Analyser:
    """Raises RequestError for an unknown name, with the nearest known one."""
    if name not in ANALYSERS:
        raise RequestError(f"there is no analyser '{name}'" + alternatives(name, ANALYSERS))
    return ANALYSERS[name]


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
        for judgement in self.judgements:
            votes = answers.setdefault((judgement.agent, judgement.channel), [])
            if judgement.answer is not None:
                votes.append(float(judgement.answer))
        return {part: estimate(votes) if votes else None for part, votes in answers.items()}

    @property
    def errors(self) -> int:
        """How often the judge gave no usable answer."""
        return sum(judgement.error is not None for judgement in self.judgements)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        shares = [
            {"agent": agent, "channel": channel, "share": None if share is None else _shown(share)}
            for (agent, channel), share in self.shares.items()
        ]
        judgements = [asdict(judgement) for judgement in self.judgements]
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
        for index, part in waiting:
            judgements[index] = await _judged(part, analyser, judge, settings, journal, label)

    await asyncio.gather(*(work() for _ in range(max_concurrency)))
    return Analysis(analyser.name, tuple(judgements[index] for index in sorted(judgements)))


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
    """The messages of an agent in a play, with the material that the judge is shown."""

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
            count = sum(line["from"] == agent for line in exchange)
            if count:
                material = {
                    "agent": agent,
                    "instructions": _instructions(record, own[0]),
                    "exchange": exchange,
                }
                yield _Part(record.id, agent, channel, count, material)


def _instructions(record: EpisodeRecord, node: Node) -> Any:
    """The agent's system prompt; the task alone where its calls were not kept."""
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
    about = (part.episode, part.agent, part.channel)
    if part.messages < analyser.least_messages:
        return Judgement(*about, reasoning=f"only {part.messages} messages")
    name = (analyser.name, part.episode, part.agent, part.channel or "*")

    async def answer() -> list[Any]:
        return list(await ask(judge, config, _system(analyser), part.material, _parse, fold(0, *name)))

    try:
        key = "/".join(("analysis", label, *name))
        verdict, reasoning = await (answer() if journal is None else journal.step(key, answer))
    except (ModelOut, StoreError):
        raise
    except EtudeError as error:
        return Judgement(*about, error=str(error))
    return Judgement(*about, verdict, reasoning)


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

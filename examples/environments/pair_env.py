"""Two agents that sort letters: a proposer answers, and a checker, who sees the answer, has the last word."""

from collections.abc import Iterator
from itertools import permutations

import verifiers.v1 as vf

ALPHABET, COUNT = "abcdefgh", 3


class LettersData(vf.TaskData):
    answer: str


class Letters(vf.Task[LettersData]):
    @property
    def key(self) -> str:
        return str(self.data.name)


def in_place(answer: str, said: str) -> float:
    """The share of letters that stand where they should."""
    return sum(one == other for one, other in zip(answer, said, strict=False)) / len(answer)


class PairConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig(max_turns=1)
    checker: vf.AgentConfig = vf.AgentConfig(max_turns=1)


class Pair(vf.Env[PairConfig]):
    async def run(self, task: Letters, agents: vf.Agents) -> None:
        proposed = await agents.proposer.run(task)
        question = f"{task.data.prompt}\nProposed: {proposed.last_reply}"
        await agents.checker.run(vf.Task(vf.TaskData(prompt=question)))

    async def finalize(self, task: Letters, episode: vf.Episode) -> None:
        for trace in episode.traces:
            trace.record_reward("in_place", in_place(task.data.answer, trace.last_reply))


class PairTaskset(vf.Taskset[Letters]):
    def load(self) -> Iterator[Letters]:
        for word in map("".join, permutations(ALPHABET, COUNT)):
            yield Letters(LettersData(name=word, prompt=f"Sort: {word}", answer="".join(sorted(word))))


__all__ = ["Pair", "PairTaskset"]

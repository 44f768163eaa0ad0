"""Environments of verifiers' as a user writes them, each the text of a module."""

SUMS = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @property
    def key(self) -> str:
        return self.data.name

    @vf.reward
    async def correct(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for number in range(8):
            yield SumTask(SumData(name=f"sum-{number}", prompt=f"{number} + 1 =", answer=str(number + 1)))


__all__ = ["Sums"]
"""

TWO_ROLES = '''
import verifiers.v1 as vf


class PairConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    checker: vf.AgentConfig = vf.AgentConfig()


class Pair(vf.Env[PairConfig]):
    """The proposer says a word; the checker is told it, and asked twice."""

    async def run(self, task, agents):
        said = await agents.proposer.run(task)
        asked = vf.Task(vf.TaskData(prompt=None, system_prompt="Check."))
        async with agents.checker.interaction(asked) as talk:
            await talk.turn(said.last_reply)
            await talk.turn("Are you sure?")

    async def finalize(self, task, episode):
        for trace in episode.traces:
            trace.record_reward("agreed", 1.0 if trace.agent.name == "checker" else 0.25)


class Words(vf.Taskset[vf.Task]):
    def load(self):
        for number in range(4):
            yield vf.Task(vf.TaskData(name=f"word-{number}", prompt=f"Word {number}?"))


__all__ = ["Pair", "Words"]
'''

CARELESS = """
import verifiers.v1 as vf


class Knobs(vf.TasksetConfig):
    fault: str = ""


class CarelessTask(vf.Task):
    @property
    def key(self) -> str:
        return "same" if FAULT[0] == "keys" else self.data.name

    async def setup(self, trace, runtime):
        if FAULT[0] == "sandbox":
            raise vf.SandboxError("the box is gone")

    @vf.reward
    async def good(self, trace) -> float:
        if FAULT[0] == "reward":
            raise ZeroDivisionError("no luck")
        return float("nan") if FAULT[0] == "nan" else 1.0


FAULT = [""]


class Careless(vf.Taskset[CarelessTask, Knobs]):
    def load(self):
        FAULT[0] = self.config.fault
        if FAULT[0] == "load":
            raise FileNotFoundError("rows.jsonl")
        for number in range(0 if FAULT[0] == "empty" else 3):
            yield CarelessTask(vf.TaskData(name=f"task-{number}", prompt="Say it."))


__all__ = ["Careless"]
"""

"""A group that trains one model for a protocol, and plays to train it on."""

import pytest

from etude.backends.trainer_adapter import Capabilities
from etude.groups import GroupAgent, ModelJobs, ModelSettings, OpenAiSharedModelGroup, agents_of_model
from etude.protocols import adp
from etude.store.journal import ModelLog
from tests.algorithms.scripted_episodes import play_out
from tests.backends.openai_stand_in import BASE
from tests.protocols.games import example
from tests.support import ScriptedEngine
from tests.training import FakeAdapter

ACCEPT, REJECT = "Decision: accept", "Decision: reject"
PROTOCOL = adp()


class Engine(ScriptedEngine):
    """An engine that is asked for a model by its name."""

    def __init__(self):
        super().__init__(["yes"])
        self.location = BASE

    async def adopt(self, version):
        await super().adopt(version)
        self.location = version.location


class Obedient(FakeAdapter):
    """Takes all hyperparameters."""

    def use_hyperparameters(self, hyperparameters):
        self.hyperparameters = hyperparameters


class Made:
    """A group with all that is around it; `again()` is the same in another process."""

    def __init__(self, folder, journal, *, protocol=PROTOCOL, adapter=None, **settings):
        self.folder, self.journal, self.protocol, self.settings = folder, journal, protocol, settings
        self.adapter = adapter or Obedient(
            folder / "backend", capabilities=Capabilities(versions=True, from_base=True)
        )
        self.engine = Engine()
        line = ModelJobs("policy", self.adapter, self.engine, ModelLog(journal, "pair"))
        shared = ModelSettings(BASE, **settings)
        agents = (
            [GroupAgent("agent", shared, "pair")]
            if protocol is None
            else agents_of_model(protocol, dict.fromkeys(protocol.agents, "policy"), "policy", "pair", shared)
        )
        self.group = OpenAiSharedModelGroup("pair", agents, line, protocol)

    def again(self):
        return Made(self.folder, self.journal, protocol=self.protocol, adapter=self.adapter, **self.settings)

    async def imitate(self, play, **options):
        """Make a job from the prover's answers in a play."""
        return await self.group.create_supervised_fine_tune_job({"prover": [play]}, **options)

    async def train_twice(self, plays):
        """Train one version after the other, and go back to the first."""
        await train(self, plays)
        state = self.group.get_state_dict()
        await self.imitate(plays[1])
        await self.group.switch_to_next_model()
        entries = self.group.lineage()
        self.group.set_state(state)
        return entries


def have_say(adapter, **changes):
    """Have a backend say that of every job."""
    status = adapter.status

    async def change_status(ref):
        return (await status(ref)).model_copy(update=changes)

    adapter.status = change_status


@pytest.fixture
def make(tmp_path, journal):
    return lambda **settings: Made(tmp_path, journal, **settings)


@pytest.fixture(name="made")
async def make_ready(make):
    """A group of the agents of a protocol, ready for jobs."""
    made = make()
    await made.group.wait_for_ready()
    return made


@pytest.fixture
async def plays(tmp_path):
    """A true claim that is accepted, and a false one that is accepted too."""
    right = await play_out(tmp_path, adp(), ["proof", ACCEPT])
    wrong = await play_out(tmp_path, adp(), ["lie", ACCEPT], about=example(0), id="train/1/f/0", generation=1)
    return right, wrong


async def train(made, plays):
    """One supervised job, made and switched to."""
    await made.group.wait_for_ready()
    await made.group.create_supervised_fine_tune_job({"prover": plays[:1], "verifier": plays[:1]})
    await made.group.wait_for_fine_tune_job(poll_interval=0)
    return await made.group.switch_to_next_model()

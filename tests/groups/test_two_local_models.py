"""Two models of one run in this process: neither evicts, overwrites or deletes what is the other's."""

import asyncio
import json

import pytest

pytest.importorskip("torch")

from etude.backends.local_adapter import LocalAdapter
from etude.backends.trainer_adapter import LocalAdapterConfig
from etude.config.finetuning import FinetuneConfig
from etude.core.call import ChatRequest, Sampling
from etude.core.sample import TrajectoryCollection
from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Trajectory
from etude.engines.embedded import EmbeddedEngine
from etude.groups import GroupAgent, ModelSettings, OpenAiSharedModelGroup
from etude.groups.model_jobs import ModelJobs
from etude.models.tiny import TinyShape, build_policy, build_tokenizer
from etude.protocols import adp
from etude.store.journal import Journal, ModelLog
from tests.protocols.games import play_record

SHAPE = TinyShape(hidden_size=16, layers=1, heads=2, intermediate_size=32, max_context=64)
ANSWERS = {"prover": "yes", "verifier": "no"}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["question yes no"], vocab_size=300)


class Model:
    """A model, its engine and its line."""

    def __init__(self, name, tokenizer, folder, journal):
        self.name, self.seed = name, len(name)
        self.policy = build_policy(tokenizer, self.seed, SHAPE)
        self.engine = EmbeddedEngine(self.policy, max_tokens=4)
        config = LocalAdapterConfig(learning_rate=0.05, passes=3)
        self.adapter = LocalAdapter(config, self.policy, folder / name, self.seed)
        self.jobs = ModelJobs("policy", self.adapter, self.engine, ModelLog(journal, name))

    async def begin(self, version=None):
        await self.adapter.initialize(FinetuneConfig())
        await self.jobs.take_up(version)

    def data(self, job):
        """One answer to imitate."""
        prompt = self.policy.template.prompt(ChatRequest(({"role": "user", "content": "question"},))).ids
        tokens = self.policy.template.completion_ids(ANSWERS[self.name])
        item = EpisodeItem(
            role=EpisodeItemRole.ASSISTANT,
            content=ANSWERS[self.name],
            token_ids=tokens,
            context_ids=prompt,
            logprobs=(0.0,) * len(tokens),
        )
        rows = [[Trajectory(episode=[item], reward=1.0)]]
        return TrajectoryCollection(trajectories=rows, run_id=job, method="supervised")

    async def answer(self):
        request = ChatRequest(
            ({"role": "user", "content": "question"},), sampling=Sampling(temperature=0.0, max_tokens=8)
        )
        return (await self.engine.complete(request)).message["content"]


@pytest.fixture
async def models(tokenizer, tmp_path):
    with Journal(tmp_path / "run.db") as journal:
        made = [Model(name, tokenizer, tmp_path / "checkpoints", journal) for name in ANSWERS]
        for model in made:
            await model.begin()
        yield made
        for model in made:
            await model.engine.close()


async def train(models, job):
    """One job for each at the same time; all adopt when all are done."""
    refs = [await model.jobs.submit(model.data(job)) for model in models]
    pairs = list(zip(models, refs, strict=True))
    statuses = await asyncio.gather(*(model.jobs.wait(ref, 60, 1) for model, ref in pairs))
    for (model, ref), status in zip(pairs, statuses, strict=True):
        await model.jobs.adopt(ref, status)


async def record_plays(model, folder, *numbers, **settings):
    """The episodes of plays in which the model answers in a few tokens."""
    with Journal(folder / "plays.db") as journal:
        return [
            await play_record(
                adp(), model.engine, journal, id=f"train/1/e/{n}", generation=n, retries=0, **settings
            )
            for n in numbers
        ]


def make_group(model, *agents):
    members = [GroupAgent(name, ModelSettings("tiny"), "prover") for name in agents]
    return OpenAiSharedModelGroup("prover", members, model.jobs, adp())


async def test_both_are_trained_at_once_and_each_samples_from_its_own_weights(models, tmp_path):
    for job in range(6):
        await train(models, f"job-{job}")
    assert {model.name: await model.answer() for model in models} == ANSWERS
    for model in models:
        assert sorted(path.name for path in (tmp_path / "checkpoints" / model.name).glob("v*")) == [
            f"v{number}" for number in range(1, 7)
        ]


async def test_deleting_versions_of_one_leaves_the_others_alone(models, tmp_path):
    await train(models, "a")
    await train(models, "b")
    prover, verifier = models
    await prover.jobs.adapter.prune([prover.jobs.version])
    assert [path.name for path in (tmp_path / "checkpoints" / "prover").glob("v*")] == ["v2"]
    await verifier.jobs.sample_from(verifier.jobs.log.state.versions[1].version)
    assert verifier.engine.version == 1


@pytest.mark.parametrize("fresh", [False, True], ids=["same-process", "fresh-process"])
async def test_a_group_that_goes_back_trains_from_there(models, tmp_path, tokenizer, fresh):
    model = models[0]
    records = await record_plays(model, tmp_path, 0, 1, 2)

    async def train_next(group, number):
        await group.create_supervised_fine_tune_job({"prover": [records[number]]})
        await group.wait_for_fine_tune_job()
        return await group.switch_to_next_model()

    group = make_group(model, "prover")
    await train_next(group, 0)
    state = group.get_state_dict()
    second = await train_next(group, 1)
    if fresh:
        model = Model("prover", tokenizer, tmp_path / "checkpoints", model.jobs.log._journal)
        await model.adapter.initialize(FinetuneConfig())
        group = make_group(model, "prover")
    group.set_state(state)
    await group.eval()
    assert model.engine.version == 1
    third = await train_next(group, 2)
    assert (third.number, group.lineage()[-1].data.parent) == (3, 1)
    assert group.lineage()[1].version == second
    job = json.loads((tmp_path / "checkpoints" / "prover" / "v3" / "job.json").read_text())
    assert job["content"]["start"] == "1"

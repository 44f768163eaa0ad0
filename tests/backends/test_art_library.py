"""The wire format, held to the real openpipe-art package, where it is installed: its routes and classes.

Only ART's GPU backend is replaced: `art run` itself parses every request.
"""

import sys
from types import ModuleType

import pytest

art = pytest.importorskip("art", reason="needs the extra 'art': pip install '.[art]'")

from art.types import MessagesAndChoices  # noqa: E402
from openai.types.chat.chat_completion import Choice  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402

from etude.config.finetuning import FinetuneConfig  # noqa: E402
from etude.core.job import TrainingStatusEnum  # noqa: E402
from etude.engines.openai_compatible import OpenAiEngine, OpenAiLlmConfig  # noqa: E402
from etude.integrations.art.adapter import ARTTrainerAdapter  # noqa: E402
from etude.integrations.art.client import ArtInference, ArtModel, to_art_groups  # noqa: E402
from etude.integrations.art.config import ARTTrainerAdapterConfig  # noqa: E402
from tests.backends.art_stand_in import StandIn, running, serving  # noqa: E402
from tests.backends.test_art_wire import collection, sample  # noqa: E402

pytestmark = pytest.mark.art

STEPS = "data/step_num_gradient_steps"

CHOICE = {
    "index": 0,
    "finish_reason": "stop",
    "logprobs": None,
    "message": {"role": "assistant", "content": "yes", "refusal": None},
}
READS_CHOICES = isinstance(TypeAdapter(MessagesAndChoices).validate_python([CHOICE])[0], Choice)
"""0.5.17 takes every dict for a message (its type skips validation): its own server trains on nothing."""


class Backend:
    """In place of ART's LocalBackend, which needs a GPU: it counts. The annotations are its own."""

    def __init__(self, inference, step):
        self.inference, self.step, self.seen = inference, step, {}

    async def close(self) -> None:
        """Nothing is open."""

    async def register(self, model: art.Model) -> None:
        self.seen["register"] = model

    async def _get_step(self, model: art.TrainableModel) -> int:
        return self.step["agent"]

    async def _prepare_backend_for_training(self, model, config):
        self.seen["prepare"] = config
        return self.inference, "default"

    async def _train_model(self, model, trajectory_groups, config, dev_config, verbose):
        self.seen["train"] = (trajectory_groups, config, dev_config)
        # As in tokenize_trajectory: only choices are trained on.
        trainable = [group for group in trajectory_groups if all(map(_has_choice, group.trajectories))]
        for _ in trainable:
            yield {"loss": 0.5, STEPS: float(len(trainable))}
        if not trainable:
            yield {STEPS: 0.0}
        self.step["agent"] += 1


def _has_choice(trajectory):
    return any(isinstance(one, Choice) for one in trajectory.messages_and_choices)


@pytest.fixture
def inference():
    """The endpoint beside the server; its steps are the backend's."""
    with running(StandIn()) as server:
        server.models["agent"] = {"base_model": "base"}
        yield server


@pytest.fixture
def art_run(inference, monkeypatch):
    """`art run`, whole but for its backend; its address."""
    import uvicorn

    local, found = ModuleType("art.local"), []
    backend = Backend(f"{inference.url}/v1", inference.steps)
    local.LocalBackend = lambda: backend
    monkeypatch.setitem(sys.modules, "art.local", local)
    import art.cli

    monkeypatch.setattr(art.cli, "LocalBackend", local.LocalBackend, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(uvicorn, "run", lambda app, **options: found.append(app))
        art.cli.run(port=1)
    with serving(found[0]) as backend.url:
        yield backend


def batch():
    pairs = [[sample(f"q{n}", "yes"), sample(f"q{n}", "no", reward=0.0)] for n in range(2)]
    return collection(*pairs)


async def test_the_real_server_takes_what_the_adapter_sends(art_run, inference, tmp_path):
    config = ARTTrainerAdapterConfig(
        backend={"base_url": art_run.url, "name": "agent"},
        training={"learning_rate": 1e-4, "beta": 0.1, "dev_config": {"epsilon": 0.3}},
    )
    endpoint = f"{inference.url}/v1"
    engine = OpenAiEngine(OpenAiLlmConfig(model_name="agent", base_url=endpoint, return_token_ids=True))
    adapter = ARTTrainerAdapter(
        config, engine=engine, inference=ArtInference(endpoint, "default"), folder=tmp_path
    )
    try:
        await adapter.initialize(FinetuneConfig())
        assert await adapter.is_healthy()
        status = await adapter.wait_until_complete(await adapter.submit(batch()))
    finally:
        await adapter.cleanup()
        await engine.close()
    model = art_run.seen["register"]
    assert (model.name, model.project) == ("agent", "trainer_project")
    groups, train_config, dev_config = art_run.seen["train"]
    assert train_config.learning_rate == 1e-4
    assert train_config.kl_penalty_coef == dev_config["kl_penalty_coef"] == 0.1
    assert dev_config["epsilon"] == 0.3
    assert [[one.reward for one in group.trajectories] for group in groups] == [[1.0, 0.0]] * 2
    if not READS_CHOICES:
        assert status.status is TrainingStatusEnum.FAILED
        assert "without training" in status.message
        return
    assert status.status is TrainingStatusEnum.COMPLETED, status.message
    assert status.version.location == "agent@1"
    assert groups[0].trajectories[0].messages() == [
        {"role": "user", "content": "q0"},
        {"role": "assistant", "content": "yes"},
    ]


def test_our_json_is_what_the_classes_of_art_write():
    (group, _) = to_art_groups(batch()).groups
    trajectory = group["trajectories"][0]
    theirs = art.Trajectory.model_validate(trajectory).model_dump(mode="json")
    (question, choice), (theirs_question, theirs_choice) = (
        one.pop("messages_and_choices") for one in (trajectory, theirs)
    )
    assert question == theirs_question
    assert {**theirs_choice, "message": {**theirs_choice["message"], **choice["message"]}} == theirs_choice
    assert choice["logprobs"] == theirs_choice["logprobs"]
    assert {key: value for key, value in theirs.items() if trajectory.get(key, value) != value} == {}


def test_our_model_is_what_their_client_sends():
    ours = ArtModel.from_config(ARTTrainerAdapterConfig(backend={"ip": "gpu", "name": "agent"})).model_dump(
        by_alias=True
    )
    theirs = art.TrainableModel(
        name="agent",
        project="trainer_project",
        base_model=ours["base_model"],
        _internal_config=ours["_internal_config"],
    ).safe_model_dump()
    assert {key: theirs.get(key, "missing") for key in ours} == ours

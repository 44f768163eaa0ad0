"""Training at a language-model server: all methods; what the stand-in claims is what a real one does."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from etude.algorithms.grpo import Grpo
from etude.algorithms.samples import ScoredEpisode, targeted_calls
from etude.backends.lm_server import BadResponseError, ClientTimeoutError, LanguageModelClient
from etude.config.finetuning import FinetuneConfig
from etude.core.conversion import to_sample
from etude.core.episode import Event
from etude.core.errors import BackendError, TrainingError
from etude.core.job import TrainingStatusEnum
from etude.core.sample import TrajectoryCollection, to_trajectory
from etude.core.training_rows import GrpoRow
from etude.models.tiny import build_policy, build_tokenizer
from tests.algorithms.scripted_episodes import conversation, episode
from tests.backends.lm_stand_in import LmStandIn
from tests.backends.test_openai_jobs import dpo, imitation, imitations
from tests.cli.projects import change, etude, local_project, process, succeed
from tests.support import read_summary


def grpo_data(job="job"):
    records = [episode(conversation("q", reply), generation=place) for place, reply in enumerate("ab")]
    scored = [ScoredEpisode(one, float(one.generation), targeted_calls(one, ["*"], None)) for one in records]
    group = [to_trajectory(sample) for each in scored for sample in each.samples()]
    return TrajectoryCollection(trajectories=[group, group], run_id=job, method="grpo")


@pytest.mark.parametrize("data", [imitations(), dpo(), grpo_data()], ids=lambda data: data.method)
async def test_a_job_of_each_method_makes_a_model(data):
    server = LmStandIn()
    adapter = server.adapter(hyperparameters={"n_epochs": 2, "learning_rate": 0.1})
    await adapter.initialize(FinetuneConfig())
    ref = await adapter.submit(data)
    status = await adapter.wait_until_complete(ref, poll_interval=0)
    assert status.status is TrainingStatusEnum.COMPLETED
    assert (ref.backend, status.version.number) == ("lm_server", 1)
    method = server.jobs["ftjob-0"]["method"]
    assert method["type"] == data.method
    parameters = method[data.method]["hyperparameters"]
    assert (parameters["n_epochs"], parameters["learning_rate"]) == (2, 0.1)
    assert server.engine == []


async def test_a_grpo_row_is_a_group_as_it_was_sampled():
    server = LmStandIn()
    data = grpo_data()
    await server.adapter().submit(data)
    rows = [GrpoRow.model_validate(row) for row in server.rows("ftjob-0")]
    assert rows == [GrpoRow.from_group([*map(to_sample, group)]) for group in data.trajectories]
    assert [one.reward for one in rows[0].trajectories] == [0.0, 1.0]


async def test_step_rewards_of_two_agents_are_compared_as_here():
    calls = [*conversation("a", "b", function="x"), *conversation("c", "d", start=1, function="y")]
    group = []
    for generation in range(2):
        events = [Event("step_reward", 0, float(generation), agent="x"), Event("step_reward", 1, 8.0)]
        record = episode(calls, generation=generation, events=events)
        group += ScoredEpisode(record, 0.0, targeted_calls(record, ["*"], None)).samples()
    server = LmStandIn()
    await server.adapter().submit(TrajectoryCollection(trajectories=[group], run_id="job", method="grpo"))
    sent = server.rows("ftjob-0")[0]["trajectories"]
    assert [one["turns"][0]["advantages"][0] for one in sent] == [
        values[0] for values in Grpo().advantages(group)
    ]


async def test_what_was_sampled_without_tokens_cannot_be_a_row():
    item = imitation("q", "a")
    bare = [one.model_copy(update={"token_ids": None}) for one in item.episode]
    group = [item.model_copy(update={"episode": bare})]
    data = TrajectoryCollection(trajectories=[group], run_id="job", method="grpo")
    server = LmStandIn()
    with pytest.raises(TrainingError, match="no token ids"):
        await server.adapter().submit(data)
    assert server.files == {}


@pytest.mark.parametrize(("options", "why"), [({}, "group are equal"), ({"beta": 0.1}, "`beta` pulls to")])
async def test_groups_of_equal_rewards_are_not_uploaded(options, why):
    server, data = LmStandIn(), grpo_data()
    flat = [[one.model_copy(update={"reward": 1.0}) for one in group] for group in data.trajectories]
    adapter = server.adapter()
    adapter.algorithm = Grpo(**options)
    result = await adapter.submit(data.model_copy(update={"trajectories": flat}))
    assert not server.files and why in result.reason


@pytest.mark.parametrize("ending", ["succeeded", "failed", "cancelled"])
async def test_the_engine_is_away_while_a_job_trains_and_back_however_it_ends(ending):
    server = LmStandIn(ending=ending)
    adapter = server.adapter(free_engine=True)
    await adapter.initialize(FinetuneConfig())
    ref = await adapter.submit(imitations())
    assert server.status["status"] == "stopped"
    await adapter.wait_until_complete(ref, poll_interval=0)
    # The server sees to it; the adapter waits until it is so.
    assert server.engine == ["away", "back", "start"]


async def test_the_engine_stays_when_nothing_trains_or_both_fit():
    server = LmStandIn()
    for request in ("POST /files", "POST /fine_tuning/jobs"):
        server.faults[request] = [400]
        with pytest.raises(BackendError):
            await server.adapter(free_engine=True).submit(imitations())
    adapter = server.adapter()
    ref = await adapter.submit(imitations())
    assert server.status["status"] == "running"
    await adapter.wait_until_complete(ref, poll_interval=0)
    assert server.engine == []


async def test_an_engine_that_does_not_come_back_is_an_error():
    server = LmStandIn()
    adapter = server.adapter(free_engine=True)
    ref = await adapter.submit(imitations())
    server.faults["POST /engine/start"] = [503] * 5
    with pytest.raises(BadResponseError, match=r"POST .*/engine/start answered HTTP 503"):
        await adapter.wait_until_complete(ref, poll_interval=0)


async def test_a_server_that_is_away_is_told_before_anything_is_sampled(monkeypatch):
    server = LmStandIn()
    server.faults["GET /health"] = ["lost"] * 6
    adapter = server.adapter()
    monkeypatch.setattr(adapter.server, "wait_for_ready", partial(adapter.server.wait_for_ready, 0))
    assert not await adapter.is_healthy() and "the connection broke" in (adapter.unhealthy_because or "")
    with pytest.raises(ClientTimeoutError):
        await adapter.initialize(FinetuneConfig())
    assert await adapter.is_healthy()


KEY = "sk-of-the-server"


class Server:
    """`etude serve` with a tiny model, in a process that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self._process: subprocess.Popen[str] | None = None
        build_policy(build_tokenizer(["t0?", "v0?", "0123456789"], splits=["[0-9]"]), 0).export(
            folder / "base"
        )

    def start(self) -> None:
        """Start, and wait until it serves."""
        arguments = ["serve", "base", "--name", "policy", "--port", self.url.rpartition(":")[2] or "0"]
        environment = {"SERVER_KEY": KEY}
        self._process = process(
            *arguments,
            *("--api-key-env", "SERVER_KEY", "--data-dir", "data"),
            folder=self.folder,
            environment=environment,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert "serving policy at" in line, line + self._process.communicate()[1]
        self.url = line.split()[3].rstrip(";").removesuffix("/v1")

    def stop(self, sent: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal, and wait for the end."""
        assert self._process is not None
        self._process.send_signal(sent)
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("server"))
    found.start()
    yield found
    found.stop()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Path:
    """The current folder, with a config that samples and trains at the server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVER", server.url)
    monkeypatch.setenv("SERVER_KEY", KEY)
    config = local_project(tmp_path, server.folder / "base")
    policy = {"_type": "openai", "provider": "etude", "model_name": "policy", "max_tokens": 8}
    adapter = {"_type": "lm_server", "hyperparameters": {"learning_rate": 3e-3, "lora_rank": 0}}
    change(
        config,
        llms={"policy": {**policy, "base_url": "${SERVER}/v1", "api_key": "${SERVER_KEY}"}},
        trainer_adapters={"server": adapter},
        trainers={"epochs": {"_type": "epochs", "poll_interval": 0.1}},
        finetuning__num_epochs=1,
    )
    return config


@pytest.mark.slow
def test_a_run_trains_there(project):
    grpo = {"_type": "grpo", "num_generations": 4}
    change(project, trajectory_builders={"made": grpo}, trainer_adapters__server__free_engine=True)
    # The server is shared, and a job's name is taken there once and for all.
    succeed("train", "config.yml", "--name", "grpo")
    summary = read_summary(Path("runs/grpo"))
    assert summary["last_version"]["location"].startswith("ft:policy:grpo-epoch-1:")
    (job,) = json.loads(etude("jobs", "grpo", "--json").stdout)
    assert (job["status"], job["backend"]) == ("completed", "lm_server")
    assert job["metrics"]["trained_tokens"] > 0


async def test_the_client_and_the_server_agree(server):
    client = LanguageModelClient(server.url, KEY)
    await client.wait_for_ready(timeout=60)
    await client.stop_engine()
    await client.stop_engine()
    assert (await client.get_engine_status()).status == "stopped"
    assert (await client.start_engine()).status == "running"
    await client.close()


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_trains_goes_on_and_so_does_the_run(project, server):
    # The job may be over before the kill; then it is the samples that have to wait for the server.
    change(project, llms__policy__max_retries=40)
    train = process("train", "config.yml", "--name", "killed", folder=project.parent)
    jobs = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"})
    while train.poll() is None and "killed-epoch-1" not in jobs.get("/v1/fine_tuning/jobs").text:
        time.sleep(0.05)
    server.stop(signal.SIGKILL)
    server.start()
    _, errors = train.communicate(timeout=120)
    assert train.returncode == 0, errors

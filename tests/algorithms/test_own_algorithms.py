"""Algorithms of a user's own, each in one file: in `local` through a config, and at a server that has it."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from openai import BadRequestError

import etude
from etude.algorithms.algorithm import changed_options, find_same_loss, make_algorithm
from etude.backends.cluster_training import ClusterLearners, ClusterOrder, Learners
from etude.backends.job_training import Job
from etude.backends.job_worker import JobFolder
from etude.backends.state_folders import JobContent, StateFolders
from etude.backends.trainer_adapter import LocalAdapterConfig
from etude.config.finetuning import FinetuneConfig
from etude.config.load import parse_config
from etude.core.conversion import to_sample
from etude.core.errors import CapabilityError, ConfigError, EtudeError, RequestError, TrainingError
from etude.core.job import ModelVersion
from etude.learner.objective import MicroBatch
from etude.server.job_request import job_algorithm, resolve_hyperparameters
from etude.store.run_folder import RunFolder
from etude.verbs import train_in
from tests.backends.lm_stand_in import LmStandIn
from tests.backends.test_hyperparameters import hyperparameters_for
from tests.backends.test_lm_server import grpo_data
from tests.backends.test_local import AGENT, make_project, run_config
from tests.models.tiny_models import policy
from tests.server.conftest import model  # noqa: F401
from tests.server.data import create, dpo, grpo, upload, wait
from tests.server.process import ServerProcess
from tests.support import one_quick


@pytest.fixture
def project(tmp_path, monkeypatch):
    for file in Path(__file__).with_name("own").glob("*.py"):
        assert len(file.read_text().splitlines()) <= 30
        shutil.copy(file, tmp_path)
    return make_project(tmp_path, monkeypatch, "tests_local_agent", AGENT)


def config(algorithm, **options):
    builders = {"own": {"_type": algorithm, "num_generations": 3} | options}
    return parse_config(run_config(1, "tests_local_agent") | {"trajectory_builders": builders})


async def train(project, name, algorithm, **options):
    """The digest of what one epoch makes, and the metrics of its job."""
    with RunFolder.create(project / "runs", name) as run:
        outcome = await train_in(config(algorithm, **options), run)
    (job,) = outcome.jobs
    return outcome.model.chosen.version.digest, job.metrics


PLAIN = "plain_gradient:PlainGradient"


@pytest.mark.parametrize(
    ("own", "other", "metric"),
    one_quick(
        ((PLAIN, {}), (PLAIN, {"floor": -5.7}), "plain_loss"),
        (("max_rl:MaxRL", {}), ("grpo", {}), "clip_fraction"),
        (("hinge:Hinge", {"beta": 0.5}), ("dpo", {"beta": 0.5}), "preferred"),
    ),
    ids=["loss", "advantage", "preference loss"],
)
async def test_a_part_of_ones_own_trains_other_weights_and_has_its_metrics(project, own, other, metric):
    """Than an algorithm that is shipped, or than itself with another option."""
    digest, metrics = await train(project, "own", own[0], **own[1])
    another, _ = await train(project, "other", other[0], **other[1])
    assert digest != another
    assert metric == "plain_loss" or 0 <= metrics[metric] <= 1
    assert metric in metrics


def test_a_wrong_option_of_ones_own_algorithm_is_told_like_any_other(project):
    with pytest.raises(ConfigError, match=r"builders\.own\.floor: .* 0, found 1"):
        config("plain_gradient:PlainGradient", floor=1)
    with pytest.raises(ConfigError, match=r"'trajectory_builders\.own\.flor'.*floor"):
        config("plain_gradient:PlainGradient", flor=-1)
    with pytest.raises(ConfigError, match=r"no module 'max_rll'.*'max_rl'"):
        config("max_rll:MaxRL")
    with pytest.raises(ConfigError, match=r"'tests_local_agent:play'.*etude\.register_"):
        config("tests_local_agent:play")


def test_an_own_algorithm_may_have_a_constructor():
    class Halved(etude.Grpo, name=""):
        def __init__(self, **options):
            super().__init__(**options | {"num_generations": options["num_generations"] // 2})

    assert Halved(num_generations=8).num_generations == 4


def test_an_option_that_is_not_json_is_refused_by_the_algorithms_name():
    class Shaped(etude.Grpo, name="shaped"):
        shape: type = int

    with pytest.raises(RequestError, match=r"shaped: .* JSON: "):
        changed_options(Shaped())


def test_a_loss_of_all_pairs_together_is_refused():
    class Mean(etude.Dpo, name=""):
        def pair_loss(self, margin_P):
            return margin_P.mean()

    batch = MicroBatch(torch.ones(4, 2), *torch.zeros(2, 4, 2), unit_share=0.5, token_share=0.5)
    with pytest.raises(TrainingError, match=r"Mean\.pair_loss .* shape \[\] for 2 pairs"):
        Mean().loss(torch.zeros(4, 2), batch)


def test_a_loss_is_that_of_the_nearest_known_algorithm_that_has_it(project):
    known = ["grpo", "dpo", "supervised"]
    config("max_rl:MaxRL"), config("hinge:Hinge"), config("plain_gradient:PlainGradient")
    assert find_same_loss(make_algorithm("max_rl:MaxRL"), known) is etude.Grpo
    assert find_same_loss(make_algorithm("hinge:Hinge"), known) is None
    assert find_same_loss(make_algorithm("plain_gradient:PlainGradient"), known) is None
    assert find_same_loss(etude.Dpo(), known) is etude.Dpo


async def test_a_server_that_does_not_know_an_advantage_gets_it_as_data(project):
    config("max_rl:MaxRL")
    server, data = LmStandIn(), grpo_data().model_copy(update={"method": "max_rl:MaxRL"})
    adapter = server.adapter()
    adapter.algorithm = make_algorithm("max_rl:MaxRL", {"clip_high": 0.3})
    await adapter.submit(data)
    method = server.jobs["ftjob-0"]["method"]
    assert (method["type"], method["grpo"]["hyperparameters"]["clip_high"]) == ("grpo", 0.3)
    group = [to_sample(one) for one in data.trajectories[0]]
    expected = make_algorithm("max_rl:MaxRL").advantages(group)
    sent = [one["turns"][0]["advantages"][0] for one in server.rows("ftjob-0")[0]["trajectories"]]
    assert sent == [values[0] for values in expected]


@pytest.mark.parametrize("floor", [None, -math.inf])
async def test_a_job_anywhere_has_all_options_of_ones_own_algorithm(project, tmp_path, floor):
    config(PLAIN)
    own = make_algorithm(PLAIN, {"floor": floor, "num_generations": 3})
    adapter, data = LmStandIn().adapter(), grpo_data().model_copy(update={"method": PLAIN})
    adapter.algorithm, adapter._algorithms = own, (PLAIN,)
    _, sent = adapter.prepare(data)
    asked = hyperparameters_for(PLAIN, **json.loads(json.dumps(sent, allow_nan=False)))
    values = resolve_hyperparameters(PLAIN, asked, 4)
    assert job_algorithm(PLAIN, values) == own

    learners = Learners(None, 1, tmp_path, "cpu")
    cluster = ClusterLearners(learners, policy(), StateFolders(tmp_path, "v", "version"), FinetuneConfig())
    job = Job("job", own, LocalAdapterConfig(), data, [], JobContent(None, None, None), seed=0)
    folder = JobFolder(tmp_path / "job-1")
    cluster._prepare(folder, job, ModelVersion(number=0, location="", digest=""))
    order = ClusterOrder.model_validate_json(folder.order.read_text())
    assert type(own).model_validate(order.algorithm_options) == own


async def test_a_server_that_has_no_such_loss_is_not_sent_another(project):
    config("plain_gradient:PlainGradient")
    data = grpo_data().model_copy(update={"method": "plain_gradient:PlainGradient"})
    with pytest.raises(CapabilityError, match="etude serve --algorithms plain_gradient:PlainGradient"):
        await LmStandIn().adapter().submit(data)
    adapter = LmStandIn().adapter()
    adapter.algorithm = make_algorithm("plain_gradient:PlainGradient")
    with pytest.raises(CapabilityError, match=r"no such loss.*`etude serve --algorithms plain"):
        await adapter.initialize(FinetuneConfig())
    for known in (etude.Malt(), etude.ExpertIteration(), make_algorithm("max_rl:MaxRL")):
        adapter.algorithm = known.objective()
        await adapter.initialize(FinetuneConfig())


@pytest.mark.slow
def test_a_server_trains_with_the_algorithms_that_it_was_started_with(project, model):  # noqa: F811
    (project / "server").mkdir()
    own = ("max_rl:MaxRL", "plain_gradient:PlainGradient", "hinge:Hinge")
    flags = [flag for name in own for flag in ("--algorithms", name)]
    with ServerProcess(model, project / "server", *flags) as server:
        client = server.client()
        rows = grpo(client, "tiny")
        for row in rows:
            row["trajectories"][1]["reward"] = 3.0
        groups, pairs = upload(client, rows), upload(client, dpo())

        def measure_metrics(file, method, **options):
            """The metrics of a job's only step."""
            options |= {"learning_rate": 0.01, "lora_rank": 4, "n_epochs": 1, "batch_size": 8}
            job = wait(client, create(client, file, method, request={"seed": 3}, **options).id)
            assert job.status == "succeeded", job.error
            events = client.fine_tuning.jobs.list_events(job.id).data
            return next(event.data for event in events if "grad_norm" in (event.data or {}))

        advantage, shipped = measure_metrics(groups, own[0]), measure_metrics(groups, "grpo")
        assert advantage["clip_fraction"] >= 0 and advantage["grad_norm"] != shipped["grad_norm"]
        assert "plain_loss" in measure_metrics(groups, own[1], floor=-20.0)
        hinge, sigmoid = (measure_metrics(pairs, method, beta=0.5) for method in (own[2], "dpo"))
        assert (hinge["loss"], sigmoid["loss"]) == (pytest.approx(1.0), pytest.approx(math.log(2)))
        with pytest.raises(BadRequestError, match="floor"):
            create(client, groups, own[1], floor=1.0)
        with pytest.raises(BadRequestError, match=r"algorithm 'bare:Bare'.*--algorithms module:Name"):
            create(client, groups, "bare:Bare")


async def test_an_algorithm_without_a_loss_is_refused_before_anything_is_sampled(project):
    (project / "bare.py").write_text("import etude\n\n\nclass Bare(etude.Algorithm): pass\n")
    with pytest.raises(RequestError, match=r"bare:Bare .*`loss`"):
        await train(project, "bare", "bare:Bare")
    with RunFolder.open(project / "runs" / "bare") as run:
        assert not list(run.journal.scan("train/"))


ODD = {
    "loss(self, logprobs_BT, batch): return logprobs_BT, {}": r"Odd\.loss .*\[\d+, \d+\]",
    "loss(self, logprobs_BT, batch): return logprobs_BT.detach().sum(), {}": r"Odd\.loss .* gradient",
    "loss(self, logprobs_BT, batch): return logprobs_BT.sum(), {'x': 'y'}": r"odd\.py:5: Odd\.loss returned",
    "loss(self, logprobs_BT, batch): raise KeyError('mine')": r"odd\.py:5: KeyError: 'mine'",
    "compare(self, rewards): raise KeyError('mine')": r"odd:Odd .*odd\.py:5: KeyError: 'mine'",
    "groups(self, episodes, tally): raise KeyError('mine')": r"odd:Odd .*odd\.py:5: KeyError: 'mine'",
    "advantages(self, group): return None": r"odd:Odd .* no advantages",
}


@pytest.mark.parametrize("method", ODD)
async def test_an_odd_method_is_named_with_what_is_odd(project, method):
    (project / "odd.py").write_text(f"import etude\n\n\nclass Odd(etude.Grpo):\n    def {method}\n")
    with pytest.raises(EtudeError, match=ODD[method]):
        await train(project, "odd", "odd:Odd")

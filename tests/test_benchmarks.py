"""The benchmarks measure what they say; how long things take is not tested."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from etude.config.document import read_document
from etude.core.trajectory import TrajectoryCollection

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("harness")


def test_both_models_give_complete_trajectories(harness: ModuleType):
    stub = importlib.import_module("stub")
    with stub.running_server() as base_url:
        for transport in ("inprocess", "http"):
            # `collect` raises when a trajectory or a call is missing.
            cost = asyncio.run(harness.collect(harness.Setting(transport, 2, 4), 16, base_url))
            assert cost.cpu_ms > 0 and cost.per_second > 0


def test_work_that_was_not_done_is_not_measured(harness: ModuleType):
    with pytest.raises(SystemExit, match="0 trajectories of 16 episodes"):
        nothing = TrajectoryCollection(run_id="epoch-0")
        harness.require_complete(nothing, harness.Setting("inprocess", 1, 4), 16)


def test_json_has_the_keys_that_others_read(harness: ModuleType):
    costs = {setting: harness.Cost(cpu_ms=1.5, per_second=100.0) for setting in harness.SETTINGS}
    found = harness.as_json(harness.Memory(60.0, 62.0, 65.0, 20_000), costs)
    cpu = {"calls1": 1.5, "calls5": 1.5}
    assert found["cpu_ms_per_trajectory"] == {"inprocess": cpu, "http": cpu}
    assert (found["trajectories_per_s"], found["peak_rss_mb"]) == (100.0, 65.0)
    assert found["rss_growth_mb_per_1000_episodes"] == 0.1
    assert len(found["settings"]) == 8


def test_a_target_is_reached_by_the_average_of_several_epochs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    demo = importlib.import_module("demo")

    def learning(rewards: list[float]) -> Any:
        nothing = demo.Measured(0.0, 0.0, 0.0, 1)
        curve = [demo.Point(epoch, 10.0 * epoch, None, reward) for epoch, reward in enumerate(rewards)]
        return demo.Learning(0, nothing, nothing, nothing, curve, 100.0, 90.0)

    assert learning([0.5, 1.0, 0.5, 0.5, 0.5]).seconds_to_target is None
    assert learning([0.5, 0.9, 0.9, 0.9, 0.9, 1.0]).seconds_to_target == 40.0
    assert learning([1.0]).seconds_to_target is None


def test_the_demos_json_has_the_median_time_of_each_task(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    demo = importlib.import_module("demo")

    def learning(task: str, seconds: float, reward: float) -> Any:
        score = demo.Measured(0.5, 0.4, 0.6, 100)
        curve = [demo.Point(epoch, seconds + epoch, seconds, reward) for epoch in range(6)]
        return demo.Learning(0, score, score, score, curve, 100.0, 90.0, task)

    runs = [learning("calculator", seconds, 0.95) for seconds in (10.0, 20.0, 40.0)]
    games = [learning("tictactoe", seconds, 0.65) for seconds in (50.0, 60.0, 90.0)]
    found = demo.as_json(runs, games)
    assert (found["seconds_to_0_9"], found["cpu_seconds_to_0_9"]) == (23.0, 20.0)
    assert (found["seconds_to_0_6_tictactoe"], found["cpu_seconds_to_0_6_tictactoe"]) == (63.0, 60.0)
    never = demo.as_json([*runs, learning("calculator", 10.0, 0.8)], [learning("tictactoe", 1.0, 0.5)])
    assert never["seconds_to_0_9"] is never["seconds_to_0_6_tictactoe"] is None
    assert "seconds_to_0_6_tictactoe" not in demo.as_json(runs)


def test_scores_of_several_seeds_are_one_sample(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    demo = importlib.import_module("demo")
    pooled = demo.pooled([demo.Measured(0.25, 0.1, 0.5, 100), demo.Measured(0.75, 0.5, 0.9, 100)])
    assert (pooled.score, pooled.n) == (0.5, 200)
    assert pooled.high - pooled.low < 0.15


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["grpo", "dpo", "sft"])
def test_all_peers_of_the_learner_do_the_same_work(monkeypatch: pytest.MonkeyPatch, method: str):
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    learner, data, peers = (importlib.import_module(f"learner{part}") for part in ("", "_data", "_trl"))
    policy, sequences = data.model(learner.HEADLINE), data.short(random.Random(0))[:16]
    units = learner.units_of(method, sequences)
    setting = learner.Setting(learner.HEADLINE, method, "short")
    own = [
        learner.gradient(policy, learner.own_step(policy, setting, units, packing=packing))
        for packing in ("tree", "padded")
    ]
    step = peers.steps(method, policy, sequences)["all"]
    step()
    grads = dict(step.model.named_parameters())
    theirs = torch.cat([grads[name].grad.flatten() for name in policy.trainable()])
    assert learner.difference(own[0], own[1]) < 1e-5
    assert learner.difference(own[0], theirs) < 1e-4


def test_the_learners_json_has_the_keys_that_others_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    learner = importlib.import_module("learner")
    ms, mb = {"tree": 2.0, "padded": 10.0, "trl": 20.0}, {"tree": 1.0, "padded": 3.0, "trl": 4.0}
    costs = {setting: learner.Cost(ms, mb, 1e-7, 100, 20) for setting in learner.settings(quick=True)}
    found = learner.as_json(costs)
    shapes = ("short", "long", "turns")
    assert found["ratio_vs_trl"] == dict.fromkeys(shapes, 10.0)
    assert found["ratio_vs_padded"] == dict.fromkeys(shapes, 5.0)
    assert found["peak_memory_ratio"] == dict.fromkeys(shapes, 0.25)
    assert found["max_relative_gradient_error"] == 1e-7
    assert len(found["settings"]) == 3
    found = learner.as_json({one: learner.Cost(ms, mb, 1e-7, 100, 20) for one in learner.long_settings()})
    assert found["ratio_vs_trl"] == {"agents": 10.0} and found["ratio_vs_padded"] == {"agents": 5.0}
    lengths = [len(one.ids) for one in importlib.import_module("learner_data").agents(random.Random(0))]
    assert 16 <= len(lengths) <= 32 and 2000 < max(lengths) <= 8000


@pytest.mark.filterwarnings("ignore")
def test_everyone_whom_the_engine_is_compared_with_samples_what_was_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delenv("ETUDE_TEST_VLLM", raising=False)
    engine, peers = importlib.import_module("engine"), importlib.import_module("engine_peers")
    policy = engine.model(engine.SMALL)
    own = engine.EmbeddedEngine(policy)
    prompts = engine.random_prompts(random.Random(0), 2)
    ours = engine.embedded(engine.asker(own), iter(range(99)))
    samples = [ours, peers.generate(policy, None), peers.continuous(policy)]
    assert [sample(prompts, 3) for sample in samples] == [[3, 3]] * 3
    with pytest.raises(SystemExit, match="3 each were wanted"):
        engine.cost_of(lambda prompts, tokens: [2] * len(prompts), prompts, 3, 1)
    with peers.vllm_of(policy, Path("nowhere")) as vllm:
        assert vllm is None
    asyncio.run(own.close())


def test_rows_that_share_a_prompt_are_measured_against_rows_that_do_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("shared_prefixes")
    policy = importlib.import_module("engine").model("0.13M")
    found = benchmark.milliseconds(policy, 1, 2, 20, steps=3)
    assert set(found) == {"shared", "apart"} and min(found.values()) > 0


def test_the_engines_json_has_the_keys_that_others_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    engine = importlib.import_module("engine")
    rates = {"etude": 30.0, "generate": 10.0, "continuous": 5.0}
    settings = [engine.Setting(engine.SMALL, count, rates, rates) for count in engine.CONCURRENCIES]
    kept = {"conversations": 2.0, "long_conversations": 4.0, "samples_of_one": 3.0}
    found = engine.as_json(settings, kept)
    at_once = ("1", "8", "64")
    assert found["ratio_vs_generate"] == dict.fromkeys(at_once, 3.0)
    assert found["ratio_vs_continuous"] == dict.fromkeys(at_once, 6.0)
    assert found["ratio_vs_vllm"] == dict.fromkeys(at_once)
    assert (found["ratio_kept_conversations"], found["ratio_shared_prompts"]) == (2.0, 3.0)
    assert found["ratio_kept_long_conversations"] == 4.0
    assert len(found["settings"]) == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_the_gpus_benchmark_runs_small_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu, common, sizes = (importlib.import_module(name) for name in ("gpu", "common", "gpu_model"))
    arguments = common.parse_arguments("", ["--small", "--profile"], **gpu.FLAGS)
    found = gpu.measure(sizes.SMALL, torch.device("cpu"), arguments, common.silent)
    assert found["exactness"]["max_relative_gradient_error_float32"] < 1e-5
    assert found["machine"]["matrix_tflops_per_s"] >= 0  # A busy core rounds to nothing.
    assert {row["shape"] for row in found["learner"]} == {"short", "long", "turns"}
    for row in found["learner"]:
        assert {"tree", "padded", "step"} <= row["ms"].keys() == row["peak_mb"].keys()
        assert row["ratio_vs_padded"] > 0
        assert row["gradient_difference"] < 0.05
        assert found["profile"][row["shape"]][0]["share"] > 0
    assert found["profile"]["sampling"][0]["share"] > 0
    for row in found["sampling"]:
        assert {"etude", "generate"} <= row["tokens_per_s"].keys()
    gpu.print_results(found)
    assert "Tokens sampled a second" in capsys.readouterr().out


def test_a_steps_work_is_counted_without_padding_or_repeats(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    data, sizes = importlib.import_module("learner_data"), importlib.import_module("gpu_model")
    sequences = data.groups(random.Random(0), 1, prompt=(10, 10), completion=(5, 5))
    plain, tree = (sizes.work_of(sequences, tree=tree) for tree in (False, True))
    assert plain == sizes.Work(8 * 15, 8 * 5, 8 * (15 * 16 // 2))
    assert tree.choices == plain.choices
    assert 10 < tree.tokens <= 10 + 8 * 5
    policy = sizes.policy_of(sizes.SMALL, torch.device("cpu"), torch.float32)
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192
    wanted = 6 * (2 * layer * plain.tokens + 512 * 64 * plain.choices + 2 * 64 * 2 * plain.looks)
    assert plain.flops(policy) == wanted


def test_environments_are_configs_of_25_lines_and_pool_their_seeds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    environments = importlib.import_module("environments")
    lines = {name: (environments.EXAMPLES / file).read_text() for name, file in environments.ENTRIES.items()}
    assert {name: len(text.splitlines()) for name, text in lines.items() if text.count("\n") > 25} == {}
    seeds = [(seed, environments.Scores((0.0, 0.5), (1.0, 1.0, 0.5))) for seed in (0, 1)]
    found = environments.pooled(seeds)
    assert (found["before"], found["n"], found["seeds"][1]["n"]) == (0.25, 6, 3)
    assert found["ci95_after"][0] < found["after"] < found["ci95_after"][1]
    assert (found["unscored"], found["why_unscored"]) == (0, None)
    partly = environments.Scores.of([(0.5, None), (None, "too long")], [(None, "late"), (1.0, None)])
    assert partly == environments.Scores((0.5,), (1.0,), ("too long", "late"))
    assert (partly.as_json()["unscored"], partly.as_json()["why_unscored"]) == (2, "too long")
    monkeypatch.setitem(environments.NEEDS, "pair", "a_package_that_is_not_there")
    assert environments.skipped(["gcd", "pair"]) == {"pair": "a_package_that_is_not_there"}


@pytest.mark.slow
def test_each_of_two_trained_models_is_measured_against_the_other_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    pytest.importorskip("textarena")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    environments = importlib.import_module("environments")
    config = read_document(environments.EXAMPLES / "kuhn_poker.yml").data
    config["workflow"] |= {"size": 4, "validation_size": 6}
    config["trajectory_builders"]["grpo"] |= {"examples_per_epoch": 2, "num_generations": 4}
    config["finetuning"]["warm_up"]["steps"] = 60  # Enough for legal moves.
    shutil.copy(environments.EXAMPLES / "careless.py", tmp_path)
    small = tmp_path / "small.yml"
    small.write_text(yaml.safe_dump(config))
    monkeypatch.setattr(environments, "OPPOSED", {str(small)})
    scores = environments.trained(str(small), seed=0, folder=tmp_path, quick=True)
    # What is before is one set of games, in which one wins what the other loses.
    assert [-score for score in scores["first"].before] == list(scores["second"].before)
    assert {len(part.after) for part in scores.values()} == {6}
    played = sorted(tmp_path.glob("*/evaluation.json"), key=lambda path: path.stat().st_mtime)
    models = [read_document(path.parent / "config.yml").data["llms"] for path in played]
    assert [[Path(llms[name]["model"]).name for name in ("first", "second")] for llms in models] == [
        ["first-warm-up", "second-warm-up"],
        ["first-last", "second-warm-up"],
        ["first-warm-up", "second-last"],
    ]


def test_a_turns_cost_is_counted_against_the_environments_own_loop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    turns = importlib.import_module("environment_turns")
    file = BENCHMARKS.parent / "examples" / "nim" / "config.yml"
    costs = asyncio.run(turns.measure(file, episodes=8, rounds=1))
    assert 0 < costs["own"] < costs["etude"]
    assert costs["overhead"] == costs["etude"] - costs["own"]


async def test_an_environment_is_played_at_random(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    run = importlib.import_module("environments_run")
    row = await run.play("Blackjack-v1", *run.ENVIRONMENTS["Blackjack-v1"], 4)
    assert (row["episodes"], row["failed"], row["invalid"]) == (4, 0, 0.0)
    assert -1 <= row["rewards"]["reward"] <= 1 <= row["answers"]
    [*_, line] = run.markdown({"Blackjack-v1": row})
    assert line.startswith("| gym `Blackjack-v1` | 4 of 4 |")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_benchmark_of_real_sizes_runs_small_and_its_json_has_the_keys_that_others_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delenv("ETUDE_TEST_VLLM", raising=False)
    real = importlib.import_module("real_size")
    threads = torch.get_num_threads()
    try:
        parts = [word for part in ("step", "sampling", "mismatch") for word in ("--only", part)]
        real.main(["--look", "--json", "--threads", "1", *parts])
    finally:
        torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out)
    assert (found["step_speedup_bf16"] is None) == (real.PRECISIONS == ("float32",))
    assert found["ratio_vs_trl"]["turns"] > 0
    assert set(found["ratio_vs_generate"]) == {"1", "2"} and found["ratio_vs_vllm"] == {"1": None, "2": None}
    assert found["share_of_limit"]["step"] > 0 and found["mismatch_kl"] < 1e-3
    real.print_results(found)


def test_shapes_of_real_sizes_have_as_many_numbers_as_their_models(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    real = importlib.import_module("real_model")
    assert real.SMOLLM.parameters() == 134_515_008 and real.QWEN.parameters() == 494_032_768
    calls = real.turns(random.Random(0))
    assert (len(calls), sum(len(one.ids) for one in calls)) == (16, 5659)

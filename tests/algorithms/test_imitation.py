"""Which episodes are imitated, decisions that are put right before that, and distillation from a teacher."""

import json
import re
from dataclasses import replace

import pytest

from etude.algorithms.distillation import Distillation
from etude.algorithms.imitation import ExpertIteration, true_decision
from etude.algorithms.samples import Tally
from etude.config.load import parse_config
from etude.core.conversion import Encoder, to_sample
from etude.core.errors import ConfigError, EtudeError, RequestError
from etude.core.sample import to_trajectory
from etude.engines.openai_compatible import OpenAiEngine, OpenAiLlmConfig
from etude.learner.learner import sample_logprobs
from etude.models.tiny import build_policy, build_tokenizer
from etude.preflight.check import check_config
from etude.protocols import SCALES, Move, adp, nip
from etude.protocols.scenario import parse_answer
from etude.store.run_folder import RunFolder
from etude.verbs import train_in
from tests.algorithms.scripted_episodes import agent_part, play_out
from tests.algorithms.test_grpo import sample
from tests.backends.test_local import AGENT, make_project, run_config
from tests.json_server import JsonServer
from tests.learner.gradients import forest
from tests.models.tiny_models import change_weights, fresh_policy, true_logprobs
from tests.protocols.games import Labelled, example
from tests.support import END

ASK, WRONG, RIGHT = "show me", "Decision: accept", "Decision: reject"


@pytest.fixture
async def fooled_play(tmp_path):
    """The claim is false, and the verifier accepts it."""
    return await play_out(tmp_path, nip(max_message_rounds=3), [ASK, "trust me", WRONG], about=example(0))


def right_decision(record):
    """The verifier's part of a play, with the true decision."""
    [part] = agent_part("verifier", record)
    return to_trajectory(true_decision(part))


async def test_a_replaced_guess_is_the_truth_after_the_same_conversation(fooled_play):
    row = right_decision(fooled_play)
    assert [(item.role, item.content) for item in row.episode] == [
        ("system", "You are verifier. e"),
        ("user", "Begin."),
        ("assistant", ASK),
        ("user", row.episode[3].content),
        ("assistant", RIGHT),
    ]
    assert "trust me" in row.episode[3].content
    assert row.metadata["guess_replaced"]
    sampled, replaced = row.episode[2], row.episode[4]
    assert sampled.token_ids == fooled_play.calls[0].completion.completion_ids
    assert (replaced.token_ids, replaced.logprobs) == (None, ())
    assert replaced.replaced


async def test_the_backend_makes_the_tokens_of_what_was_not_sampled(fooled_play):
    row = right_decision(fooled_play)
    encoder = Encoder(lambda prompt: (), lambda text: (*text.encode(), END))
    sample = to_sample(row, encoder, needs_logprobs=False)
    assert sample.ids == (*fooled_play.calls[2].completion.prompt_ids, *RIGHT.encode(), END)
    trained = bytes(token for token, weight in zip(sample.ids, sample.mask, strict=True) if weight)
    assert trained == ASK.encode() + bytes([END]) + RIGHT.encode() + bytes([END])


@pytest.mark.parametrize("scale", [*SCALES])
@pytest.mark.parametrize("truth", [0, 1])
async def test_a_replaced_guess_is_one_that_the_protocols_own_scale_reads(tmp_path, scale, truth):
    protocol = adp(verifier_decision_spectrum=scale)
    wrong = f"Decision: {SCALES[scale].strongest(1 - truth)}"
    record = await play_out(tmp_path, protocol, ["trust me", wrong], about=example(truth))
    row = right_decision(record)
    (turn,) = protocol.rounds(0)[1]
    assert parse_answer(row.episode[-1].content, turn).decision == (1.0 if truth else -1.0)


class JsonVerdicts(Labelled):
    """Reads a verdict in a format of its own, and raises on any other text."""

    def parse(self, text, turn):
        if turn.decide == "no":
            return Move(dict.fromkeys(turn.writes, text))
        return Move(decision=2.0 * json.loads(text)["right"] - 1)

    def write_decision(self, verdict, turn):
        return json.dumps({"right": verdict})


async def test_a_replaced_guess_is_written_as_the_scenario_reads_it(tmp_path):
    answers = ["trust me", '{"right": 1}']
    record = await play_out(tmp_path, adp(), answers, about=example(0), scenario=JsonVerdicts())
    assert right_decision(record).episode[-1].content == '{"right": 0}'


class Unwritable(JsonVerdicts):
    """Says nothing of how a verdict is written."""

    def write_decision(self, verdict, turn):
        return "yes" if verdict else "no"


async def test_a_guess_that_cannot_be_written_is_no_row_but_an_error(tmp_path):
    answers = ["trust me", '{"right": 1}']
    record = await play_out(tmp_path, adp(), answers, about=example(0), scenario=Unwritable())
    with pytest.raises(RequestError, match=r"'train/1/e/0'.* 'verifier'.*write_decision"):
        right_decision(record)


async def test_each_agent_is_selected_by_what_it_earned_itself(tmp_path):
    fooling = await play_out(tmp_path, adp(), ["lie", WRONG], about=example(0))
    algorithm = ExpertIteration(min_reward=0.5)
    parts = [agent_part("prover", fooling), agent_part("verifier", fooling)]
    prover, verifier = (group.samples for group in algorithm.groups(parts, Tally()))
    assert [sample.messages[-1]["content"] for sample in prover] == ["lie"]
    assert verifier == []


def with_teacher(reward, teacher, student):
    one = sample(reward, len(teacher))
    return replace(one, teacher_logprobs=(0.0, *teacher), logprobs=(0.0, *student))


def test_an_advantage_is_what_the_teacher_gives_a_token_more_than_the_policy():
    group = [with_teacher(1.0, [-0.5, -2.0], [-1.0, -1.0]), with_teacher(0.0, [-1.0], [-1.5])]
    alone = Distillation().units([group])
    assert [unit[0].advantages for unit in alone] == [(0, 0.5, -1.0), (0, 0.5)]
    with pytest.raises(RequestError, match=r"cut_off_penalty .*reward_weight"):
        Distillation(cut_off_penalty=0.1).check()
    both = Distillation(reward_weight=2.0).units([group])
    assert [unit[0].advantages for unit in both] == [(0, 2.5, 1.0), (0, -1.5)]


def test_scores_are_the_models_logprobs_at_the_temperature_of_the_sample():
    policy, samples = fresh_policy(), forest(2, 6, temperatures=(1.0, 0.7))
    for one, scores in zip(samples, sample_logprobs(policy, samples, token_budget=40), strict=True):
        true = [0.0, *true_logprobs(policy, one.ids[:1], one.ids[1:], one.turns[0].sampling.temperature)]
        expected = [value if sampled else 0.0 for value, sampled in zip(true, one.mask, strict=True)]
        assert scores == pytest.approx(expected, abs=1e-4)


def config(**options):
    data = run_config(2, "tests_local_agent")
    data["llms"]["expert"] = data["llms"]["policy"] | {"model": "expert"}
    data["finetuning"]["target_model"] = "policy"
    data["trajectory_builders"] = {"distil": {"_type": "distillation", "num_generations": 2} | options}
    return parse_config(data)


async def test_a_run_learns_from_a_teacher_in_this_process_and_asks_it_once(tmp_path, monkeypatch):
    make_project(tmp_path, monkeypatch, "tests_local_agent", AGENT)
    expert = fresh_policy(max_context=128)
    change_weights(expert, lambda one: one.mul_(1.5))
    expert.export(tmp_path / "expert")
    with pytest.raises(ConfigError, match="teacher"):
        config(teacher="nobody")
    stranger = build_policy(
        build_tokenizer(["other words for another vocabulary"] * 9, vocab_size=300), seed=0
    )
    stranger.export(tmp_path / "stranger")
    other = config(teacher="expert")
    other.llms["expert"] = other.llms["expert"].model_copy(update={"model": "stranger"})
    served = config(teacher="expert")
    served.llms["expert"] = OpenAiLlmConfig(
        base_url="http://127.0.0.1:9/v1", model_name="x", provider="etude"
    )
    told = {r"'expert' .* tokenizer .* 'policy'": other, r"'expert' \(`etude serve`\) .* vLLM": served}
    told[r"'x' .*no prompt_logprobs .* teacher"] = silent = config(teacher="expert")
    told |= {"'policy' is the model in training": config(teacher="policy")}
    for index, (message, wrong) in enumerate(told.items()):
        with (
            RunFolder.create(tmp_path / "runs", f"other{index}") as run,
            JsonServer(lambda *_: (200, {"choices": [{"text": ""}]})) as server,
        ):
            silent.llms["expert"] = OpenAiLlmConfig(base_url=server.url, model_name="x", max_retries=0)
            with pytest.raises(EtudeError, match=message):
                await train_in(wrong, run)
            told_before = [each.detail for each in (await check_config(wrong))[0].items]
            assert wrong is other or any(re.search(message, detail) for detail in told_before), told_before
            assert not [key for key, _ in run.journal.scan() if "/call/" in key], "before any is sampled"
    with RunFolder.create(tmp_path / "runs", "run") as run:
        outcome = await train_in(config(teacher="expert"), run)
        assert len({outcome.version(wish).chosen.version.digest for wish in ("v1", "v2")}) == 2
        jobs = outcome.jobs
        asked = [key for key, _ in run.journal.scan("teacher/expert/")]
        assert len(asked) == len(set(asked)) == 2, "once an epoch"
    with RunFolder.open(tmp_path / "runs" / "run") as run:
        again = await train_in(config(teacher="expert"), run)
        assert again.jobs == jobs
        assert len(list(run.journal.scan("teacher/expert/"))) == len(asked)


async def test_an_endpoint_scores_token_ids():
    def answer(path, headers, body):
        asked = json.loads(body)
        assert (path, asked["max_tokens"], asked["prompt_logprobs"]) == ("/v1/completions", 1, 0)
        rows = [None, *({str(token): {"logprob": -token / 10}} for token in asked["prompt"][1:])]
        return 200, {"choices": [{"text": "", "prompt_logprobs": rows}]}

    with JsonServer(answer) as server:
        config = OpenAiLlmConfig(base_url=server.url, model_name="large", api_key="x", max_retries=0)
        engine = OpenAiEngine(config)
        assert await engine.score((7, 3, 5)) == (0.0, -0.3, -0.5)
        await engine.close()

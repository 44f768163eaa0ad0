"""Which episodes are imitated, and decisions that are put right before that."""

import json

import pytest

from etude.algorithms import imitation
from etude.algorithms.episodes import Collected, Tally
from etude.algorithms.imitation import GuessReplacementConfig, SelectionConfig
from etude.core.edge import Encoder, sample_of, trajectory_of
from etude.core.errors import RequestError
from etude.protocols import SCALES, Act, adp, nip
from etude.protocols.scenario import parse_answer
from tests.algorithms.scripted_episodes import part_of, played
from tests.protocols.games import Labelled, example
from tests.support import END


def imitations(groups, config, discount, epoch, seed, tally):
    made = imitation.imitations(groups, config, discount, Collected(epoch, seed, tally))
    return [[*map(trajectory_of, group.units)] for group in made]


@pytest.mark.parametrize(
    ("annealing", "expected"),
    [
        ({}, [0.2, 0.2, 0.2, 0.2]),
        ({"annealing": "linear", "annealing_rate": 0.08}, [0.2, 0.12, 0.04, 0.0]),
        ({"annealing": "exponential", "annealing_rate": 0.5}, [0.2, 0.1, 0.05, 0.025]),
    ],
)
def test_the_share_of_replaced_guesses_is_annealed(annealing, expected):
    config = GuessReplacementConfig(proportion=0.2, **annealing)
    assert [config.share(epoch) for epoch in range(4)] == pytest.approx(expected)


ASK, WRONG, RIGHT = "show me", "Decision: accept", "Decision: reject"


@pytest.fixture
async def fooled(tmp_path):
    """The claim is false, and the verifier accepts it."""
    return await played(tmp_path, nip(max_message_rounds=3), [ASK, "trust me", WRONG], about=example(0))


def verifier_rows(record, tally=None, **replacement):
    config = SelectionConfig(min_reward=0.5, guess_replacement=GuessReplacementConfig(**replacement))
    return imitations([part_of("verifier", record)], config, 1.0, 0, 7, tally or Tally())[0]


async def test_a_replaced_guess_is_the_truth_after_the_same_conversation(fooled):
    assert verifier_rows(fooled) == []
    (row,) = verifier_rows(fooled, proportion=1.0)
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
    assert sampled.token_ids == fooled.calls[0].completion.completion_ids
    assert (replaced.token_ids, replaced.logprobs) == (None, ())
    assert replaced.replaced


async def test_the_backend_makes_the_tokens_of_what_was_not_sampled(fooled):
    (row,) = verifier_rows(fooled, proportion=1.0)
    encoder = Encoder(lambda prompt: (), lambda text: (*text.encode(), END))
    sample = sample_of(row, encoder, needs_logprobs=False)
    prompt = fooled.calls[2].completion.prompt_ids
    assert sample.ids == (*prompt, *RIGHT.encode(), END)
    trained = bytes(token for token, weight in zip(sample.ids, sample.mask, strict=True) if weight)
    assert trained == ASK.encode() + bytes([END]) + RIGHT.encode() + bytes([END])


@pytest.mark.parametrize("scale", [*SCALES])
@pytest.mark.parametrize("truth", [0, 1])
async def test_a_replaced_guess_is_one_that_the_protocols_own_scale_reads(tmp_path, scale, truth):
    protocol = adp(verifier_decision_spectrum=scale)
    wrong = f"Decision: {SCALES[scale].strongest(1 - truth)}"
    record = await played(tmp_path, protocol, ["trust me", wrong], about=example(truth))
    (row,) = verifier_rows(record, proportion=1.0)
    (turn,) = protocol.rounds(0)[1]
    act = parse_answer(row.episode[-1].content, turn)
    assert act.decision == (1.0 if truth else -1.0)


class JsonVerdicts(Labelled):
    """Reads a verdict in a format of its own, and raises on any other text."""

    def parse(self, text, turn):
        if turn.decide == "no":
            return Act(dict.fromkeys(turn.writes, text))
        return Act(decision=2.0 * json.loads(text)["right"] - 1)

    def write_decision(self, verdict, turn):
        return json.dumps({"right": verdict})


async def test_a_replaced_guess_is_written_as_the_scenario_reads_it(tmp_path):
    answers = ["trust me", '{"right": 1}']
    record = await played(tmp_path, adp(), answers, about=example(0), scenario=JsonVerdicts())
    (row,) = verifier_rows(record, proportion=1.0)
    assert row.episode[-1].content == '{"right": 0}'


class Unwritable(JsonVerdicts):
    """Says nothing of how a verdict is written."""

    def write_decision(self, verdict, turn):
        return "yes" if verdict else "no"


async def test_a_guess_that_cannot_be_written_is_no_row_but_an_error(tmp_path):
    answers = ["trust me", '{"right": 1}']
    record = await played(tmp_path, adp(), answers, about=example(0), scenario=Unwritable())
    assert verifier_rows(record) == []
    with pytest.raises(RequestError, match=r"'train/1/e/0'.*answer of 'verifier'.*write_decision"):
        verifier_rows(record, proportion=1.0)


async def test_replaced_guesses_are_a_share_of_all_and_the_rest_is_selected_by_reward(tmp_path):
    records = []
    for generation in range(4):
        answers = ["proof", RIGHT if generation % 2 else WRONG]
        records.append(
            await played(
                tmp_path,
                adp(),
                answers,
                about=example(0),
                generation=generation,
                id=f"train/1/e/{generation}",
            )
        )
    config = SelectionConfig(min_reward=0.5, guess_replacement=GuessReplacementConfig(proportion=0.5))
    (rows,) = imitations([part_of("verifier", *records)], config, 1.0, 0, 3, Tally())
    replaced = [row for row in rows if row.metadata.get("guess_replaced")]
    selected = [row for row in rows if not row.metadata.get("guess_replaced")]
    assert len(replaced) == 2
    assert all(row.reward == 1.0 for row in selected)
    places = [row.metadata["generation"] for row in rows]
    assert len(set(places)) == len(places)
    assert all(row.episode[-1].content == RIGHT for row in rows)


async def test_each_agent_is_selected_by_what_it_earned_itself(tmp_path):
    fooling = await played(tmp_path, adp(), ["lie", WRONG], about=example(0))
    config = SelectionConfig(min_reward=0.5)
    parts = [part_of("prover", fooling), part_of("verifier", fooling)]
    prover, verifier = imitations(parts, config, 1.0, 0, 0, Tally())
    assert [row.episode[-1].content for row in prover] == ["lie"]
    assert verifier == []

"""The warnings of a run, and when a person gets them."""

from pathlib import Path

from etude.core.history import History
from etude.store.summary import causes_in, collapse_in, new_warnings, warnings_of
from tests.report.histories import epoch, history, validation

RUN = Path("runs/r")


def measured(number, reward, low, high):
    return validation(number, reward, reward_low=low, reward_high=high)


def collapsed(*later):
    return History(run_id="r", epochs=(epoch(0, 0.4),), validations=(measured(0, 0.412, 0.37, 0.46), *later))


def test_a_reward_surely_below_its_start_is_a_collapse():
    past = collapsed(measured(1, 0.0, 0.0, 0.01))
    (text,) = warnings_of(past)
    assert "collapsed to 0.000 [0.000, 0.010] (validation examples, after epoch 1 (v1))" in text
    assert "from 0.412 [0.370, 0.460]" in text
    assert "v1 is worse than the model that training began with" in text
    assert new_warnings(past.validations, RUN) == [text]


def test_intervals_that_touch_are_no_collapse():
    assert warnings_of(collapsed(measured(1, 0.3, 0.2, 0.38))) == []
    assert warnings_of(collapsed(measured(1, 0.9, 0.8, 0.95))) == []
    assert warnings_of(collapsed(measured(1, None, None, None))) == []


def test_shaped_rewards_that_have_become_constant_can_be_a_collapse():
    """Many equal rewards outside of [0, 1] have no interval."""
    constant = validation(1, -1.0, num_scored=60)
    past = History(run_id="r", validations=(measured(0, 5.0, 4.0, 6.0), constant))
    assert "collapsed to -1.000 (" in str(collapse_in(past))
    single = validation(1, -1.0, num_scored=1)
    assert collapse_in(past.model_copy(update={"validations": (past.validations[0], single)})) is None


def test_a_collapse_is_told_once_and_again_after_a_recovery():
    low, back = (0.0, 0.0, 0.01), (0.4, 0.3, 0.5)
    assert new_warnings(collapsed(measured(1, *low), measured(2, *low)).validations, RUN) == []
    again = collapsed(measured(1, *low), measured(2, *back), measured(3, *low))
    assert len(new_warnings(again.validations, RUN)) == 1


def test_a_run_that_recovered_has_not_collapsed():
    assert collapse_in(collapsed(measured(1, 0.0, 0.0, 0.01), measured(2, 0.5, 0.4, 0.6))) is None


def test_without_validations_the_training_episodes_show_a_collapse():
    entries = (epoch(0, 0.4, reward_low=0.3, reward_high=0.5), epoch(1, 0.0, reward_low=0.0, reward_high=0.1))
    text = collapse_in(History(run_id="r", epochs=entries))
    assert text is not None
    assert "training episodes of epoch 2, sampled from v1" in text
    assert "v1 may be worse" in text, "the epochs can have gone through different examples"


def test_with_other_models_in_training_a_lower_reward_can_be_theirs():
    metrics = {"reward_low": 0.0, "reward_high": 0.01, "target": "prover"}
    text = collapse_in(collapsed(validation(1, 0.0, **metrics)))
    assert text is not None
    assert "v1 may be worse" in text and "or the others have got better" in text


def test_an_epoch_of_flat_groups_is_told_when_it_begins():
    flat = {"reward_groups": {"compared": 4, "flat": 4}}
    assert new_warnings([epoch(0, 1.0, **flat)], RUN) == [
        "epoch 1: within each of the 4 groups all rewards are equal, so there is nothing to learn from "
        "comparing them"
    ]
    assert new_warnings([epoch(0, 1.0, **flat), epoch(1, 1.0, **flat)], RUN) == []
    assert new_warnings([epoch(0, 1.0, reward_groups={"compared": 4, "flat": 3})], RUN) == []
    assert new_warnings([epoch(0, 1.0, reward_groups={"compared": 0, "flat": 0})], RUN) == []
    (text,) = warnings_of(History(run_id="r", epochs=(epoch(0, 1.0, **flat), epoch(1, 1.0, **flat))))
    assert text.startswith("epoch 2 (and 1 other): within each")


def test_many_cut_off_answers_are_told():
    (text,) = new_warnings([epoch(0, 0.5, calls={"answers": 100, "cut_off": 21})], RUN)
    assert "21 of 100 answers (21 %) were cut off at the limit of tokens" in text
    assert new_warnings([epoch(0, 0.5, calls={"answers": 100, "cut_off": 20})], RUN) == []
    assert new_warnings([validation(0, 0.5, calls={"answers": 2, "cut_off": 2})], RUN)[0].startswith(
        "validation before training: 2 of 2 answers (100 %)"
    )


def cause(reason, count=3, kind="call_failed", episode="train/1/a/1"):
    return {"kind": kind, "reason": reason, "count": count, "episode": episode}


def test_causes_of_failures_are_told_with_an_episode_and_the_command_that_shows_it():
    causes = [cause("HTTP 401: wrong key", 12), cause("KeyError: 'q'", 4, "raised", "train/1/b/0")]
    metrics = {"failures": {"call_failed": 12, "raised": 4, "score:brief": 2}, "failure_causes": causes}
    (text,) = new_warnings([epoch(0, None, skipped="nothing", **metrics)], RUN)
    assert text == (
        "epoch 1: 16 episodes and 2 scores failed: 12 × call_failed: HTTP 401: wrong key; "
        "4 × raised: KeyError: 'q'. One of them: etude transcripts runs/r --episode train/1/a/1"
    )


def test_a_cause_that_goes_on_is_not_told_again_and_a_new_one_is():
    first = epoch(0, 0.5, failure_causes=[cause("no answer within 30 s")])
    same = epoch(1, 0.5, failure_causes=[cause("no answer within 31 s", episode="train/2/a/0")])
    other = epoch(1, 0.5, failure_causes=[cause("HTTP 500: oops")])
    assert new_warnings([first, same], RUN) == []
    assert "HTTP 500: oops" in new_warnings([first, other], RUN)[0]


def test_causes_are_added_up_over_epochs():
    entries = [
        epoch(0, 0.5, failure_causes=[cause("took longer than 30 s", 2)]),
        epoch(1, 0.5, failure_causes=[cause("took longer than 31 s", 5), cause("oops", 1)]),
    ]
    first, second = causes_in(entries)
    assert (first["count"], first["reason"], first["episode"]) == (7, "took longer than 30 s", "train/1/a/1")
    assert second["count"] == 1


def test_a_run_that_goes_well_has_no_warnings():
    assert warnings_of(history([0.1, 0.5], {0: 0.1, 2: 0.6})) == []
    assert new_warnings([], RUN) == []

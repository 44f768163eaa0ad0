"""The figures of a run, as they are printed."""

from etude.core.history import History
from etude.report.words import figure_lines
from etude.store.summary import summary_of
from tests.report.histories import epoch, history, validation


def lines(past):
    return dict(figure_lines(summary_of(past)))


def score(mean, n=10):
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "n": n}


def test_validations_are_before_and_after():
    assert lines(history([0.2], {0: 0.1, 1: 0.8})) == {
        "reward before": "0.100 (all equal: no interval)  n=10  (validation examples, before training (v0))",
        "reward after": "0.800 (all equal: no interval)  n=10  (validation examples, after epoch 1 (v1))",
        "best version": "v1",
        "last version": "v1",
    }


def test_all_evaluators_are_there_where_there_are_several():
    both = [
        validation(number, 0.5, evaluators={"right": score(0.5), "brief": score(0.25 + number, n=9)})
        for number in (0, 1)
    ]
    shown = lines(History(run_id="r", epochs=(epoch(0, 0.5),), validations=tuple(both)))
    assert shown["brief"] == "0.250 [0.150, 0.350]  n=9 → 1.250 [1.150, 1.350]  n=9"
    assert shown["right"] == "0.500 [0.400, 0.600]  n=10 → 0.500 [0.400, 0.600]  n=10"
    alone = History(run_id="r", validations=(validation(0, 0.5, evaluators={"right": score(0.5)}),))
    assert "right" not in lines(alone), "it is the reward"


def test_without_validation_what_is_missing_is_said():
    shown = lines(history([0.2]))
    assert shown["reward"] == "0.200  (training episodes of epoch 1, sampled from v0)"
    assert "best version" not in shown
    assert shown["not measured"] == (
        "nothing was measured after the last update of v1: no validation of held-out examples "
        "(finetuning.run_configuration.validation_dataset) was run"
    )


def test_a_validation_that_is_still_to_come_is_missing_too():
    shown = lines(history([0.2, 0.3], {0: 0.1, 1: 0.2}))
    assert shown["not measured"] == "nothing was measured after the last update of v2"


def test_the_base_model_is_called_what_it_is():
    worse = lines(history([0.4], {0: 0.4, 1: 0.0}))
    assert worse["best version"] == "v0, the base model: no trained version has done better"
    untrained = lines(History(run_id="r", epochs=(epoch(0, None, skipped="nothing"),)))
    assert untrained["last version"] == "v0, the base model: nothing was trained"
    assert "not measured" not in untrained


def test_a_version_of_a_backend_is_shown_with_its_name():
    past = history([0.2], {0: 0.1, 1: 0.8})
    hosted = past.validations[1].version.model_copy(update={"location": "ft:model:1"})
    entry = past.validations[1].model_copy(update={"version": hosted})
    trained = past.epochs[0].model_copy(update={"version": hosted})
    shown = lines(History(run_id="r", epochs=(trained,), validations=(past.validations[0], entry)))
    assert shown["best version"] == shown["last version"] == "v1  ft:model:1"

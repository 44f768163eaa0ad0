"""The figures of a run, as they are printed."""

from etude.core.history import History
from etude.report.words import figure_lines
from etude.store.figures import summary_of
from tests.report.histories import epoch, history, validation


def lines(past):
    return dict(figure_lines(summary_of(past)))


def score(mean, n=10):
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "n": n}


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


def test_the_base_model_is_called_what_it_is():
    worse = lines(history([0.4], {0: 0.4, 1: 0.0}))
    assert worse["best version"] == "v0, the base model: no trained version has done better"
    untrained = lines(History(run_id="r", epochs=(epoch(0, None, skipped="nothing"),)))
    assert untrained["last version"] == "v0, the base model: nothing was trained"
    assert "not measured" not in untrained

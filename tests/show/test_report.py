"""The figures that a run reports in words, its files of metrics, plots and progress."""

import io
import json

import pytest

from etude.core.call import Call, ChatRequest, Completion, Usage
from etude.core.episode import EpisodeRecord, Example, Failure
from etude.core.errors import install_command
from etude.core.evaluation import EvalOutputItem
from etude.core.history import History
from etude.show.metrics_files import render_reward_plot, write_metrics
from etude.show.progress import JsonProgress, LineProgress
from etude.store.figures import summarize
from tests.show.histories import NOW, epoch, history, validation
from tests.support import one_quick


def figures(past):
    return dict(summarize(past).lines())


def score(mean, n=10):
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "n": n}


def test_all_evaluators_are_there_where_there_are_several():
    both = [
        validation(number, 0.5, evaluators={"right": score(0.5), "brief": score(0.25 + number, n=9)})
        for number in (0, 1)
    ]
    shown = figures(History(run_id="r", epochs=(epoch(0, 0.5),), validations=tuple(both)))
    assert shown["brief"] == "0.250 [0.150, 0.350]  n=9 → 1.250 [1.150, 1.350]  n=9"
    assert shown["right"] == "0.500 [0.400, 0.600]  n=10 → 0.500 [0.400, 0.600]  n=10"
    alone = History(run_id="r", validations=(validation(0, 0.5, evaluators={"right": score(0.5)}),))
    assert "right" not in figures(alone), "it is the reward"


def test_reward_and_validation_history_have_the_fields_of_the_reference(tmp_path):
    rewards: dict[str, object] = {"min_reward": 0.0, "max_reward": 1.0, "reward_low": 0.4, "reward_high": 0.6}
    rewards["num_scored"] = 9
    rewards["evaluators"] = {"brief": {"mean": 0.25, "low": 0.1, "high": 0.4, "n": 9}}
    validated = (validation(0, 0.5, **rewards, num_unscored=1),)
    whole = History(run_id="run", epochs=(epoch(0, 0.5, **rewards),), validations=validated)
    write_metrics(whole, tmp_path)
    common = {"epoch": 1, "timestamp": NOW, "avg_reward": 0.5, **rewards}
    assert json.loads((tmp_path / "reward_history.json").read_text()) == [common | {"num_trajectories": 8}]
    assert json.loads((tmp_path / "validation_history.json").read_text()) == [
        common | {"epoch": 0, "num_examples": 10, "num_unscored": 1}
    ]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    entry = epoch(0, 0.5, training={"kl": float("nan"), "steps": [float("inf"), 1.0]})
    write_metrics(History(run_id="run", epochs=(entry,)), tmp_path)
    text = (tmp_path / "training_metrics.jsonl").read_text()
    assert "NaN" not in text
    assert json.loads(text)["training"] == {"kl": None, "steps": [None, 1.0]}


EVERYTHING = History(
    run_id="run",
    epochs=tuple(epoch(n, 0.1 * n) for n in range(4)),
    validations=tuple(
        validation(n, 0.2 * n, reward_low=0.2 * n - 0.1, reward_high=0.2 * n + 0.1) for n in (0, 2, 4)
    ),
)


@pytest.mark.parametrize(
    "past", one_quick(EVERYTHING, history([]), history([None, 0.5]), history([0.5], {0: None}))
)
def test_any_history_can_be_drawn(past):
    assert render_reward_plot(past).startswith(b"\x89PNG\r\n\x1a\n")


def test_without_matplotlib_a_run_goes_on_and_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("etude.show.metrics_files.render_reward_plot", render_reward_plot)
    monkeypatch.setattr("etude.core.errors.find_spec", lambda name: None)
    messages = []
    write_metrics(history([0.1]), tmp_path)
    write_metrics(history([0.1, 0.2]), tmp_path, final=True, tell=messages.append)
    assert (tmp_path / "training_metrics.jsonl").read_text().count("\n") == 2
    assert not (tmp_path / "reward_plot.png").exists()
    (message,) = messages
    assert install_command("plots") in message


def episode(tokens=10, failure=None):
    completion = Completion(message={"role": "assistant", "content": "x"}, usage=Usage(5, tokens))
    call = Call(0, "<workflow>", "policy", ChatRequest(()), completion)
    return EpisodeRecord(id="train/1/a/0", example=Example("a"), generation=0, calls=(call,), failure=failure)


def play(progress, advance=lambda seconds: None):
    """A run of one validated, one trained and one skipped epoch."""
    progress.run_started("brave-otter", 2, {"examples": 4, "folder": "runs/brave-otter"})
    progress.phase("validating", 1)
    progress.episode_finished(episode())
    progress.validated(0, {"avg_reward": 0.25, "reward_low": 0.1, "reward_high": 0.4, "num_examples": 1})
    progress.epoch_started(1, 2)
    progress.phase("collecting", 2)
    progress.episode_finished(episode())
    progress.scored(EvalOutputItem(id="a", score=0.5))
    advance(10)
    progress.episode_finished(episode(failure=Failure("timeout", "took longer than 5 s")))
    progress.scored(EvalOutputItem(id="a", error="no output"))
    progress.phase("training")
    counts = {"filtered_trajectories": 2, "failures": {"timeout": 1}, "cut_off_share": 0.002}
    counts["calls"] = {"retries": 0, "tool_calls": 5, "tool_failed": 3}
    progress.trained(1, {"avg_reward": 0.5, **counts})
    progress.epoch_started(2, 2)
    progress.skipped(2, "nothing to train on")
    progress.message("look here", warning=True)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


def test_plain_lines_tell_a_run_from_beginning_to_end():
    stream, clock = io.StringIO(), Clock()
    with LineProgress(stream, clock=clock) as progress:
        play(progress, clock.advance)
    assert stream.getvalue().splitlines() == [
        "run brave-otter: 2 epochs (examples 4, folder runs/brave-otter)",
        "validating 1 episodes",
        "validation before training: reward 0.250 [0.100, 0.400], n=1",
        "epoch 1/2: collecting 2 episodes",
        "epoch 1/2: 2/2 episodes, reward so far 0.500, 1 failed, 2 tokens/s",
        "epoch 1/2: reward 0.500, 2 trajectories, fewer than 1% of answers cut off, 1 failed, 3 tool "
        "calls failed, 10.0 s elapsed",
        "epoch 2/2 skipped: nothing to train on",
        "warning: look here",
    ]


def test_json_lines_are_one_object_for_each_event():
    stream = io.StringIO()
    with JsonProgress(stream) as progress:
        play(progress)
        progress.finished({"epochs_trained": 1, "reward": float("nan")})
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == [
        *("run_started", "phase", "episode_finished", "validated"),
        *("epoch_started", "phase", "episode_finished", "scored", "episode_finished", "scored"),
        *("phase", "trained", "epoch_started", "skipped", "message", "finished"),
    ]
    assert events[8]["failure"] == "timeout: took longer than 5 s"
    assert events[-1] == {"event": "finished", "epochs_trained": 1, "reward": None}


SPENT = {"usd": 1.25, "tokens": 900, "limits": {"budget.usd": [1.25, 20.0], "budget.tokens": [80, 1e6]}}


def test_displays_show_what_is_spent_of_what():
    stream, clock = io.StringIO(), Clock()
    with LineProgress(stream, clock=clock) as progress:
        progress.spent(SPENT)
        progress.phase("collecting", 2)
        clock.advance(11)
        progress.episode_finished(episode())
    assert stream.getvalue().splitlines()[-1].endswith("tokens/s, usd 1.25 of 20, tokens 80 of 1,000,000")
    for usd, shown in ((0.0, "elapsed"), (0.5, "elapsed, $0.50")):
        progress.spent({"usd": usd, "tokens": 900, "limits": {}})
        progress.trained(1, {"avg_reward": 0.5})
        assert stream.getvalue().rstrip().endswith(shown)

import io
import json

from rich.console import Console

from etude.core.call import Call, ChatRequest, Completion, Usage
from etude.core.episode import EpisodeRecord, Example, Failure
from etude.core.evaluation import EvalOutputItem
from etude.report.progress import JsonProgress, LineProgress, LiveProgress


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
    counts = {"filtered_trajectories": 2, "failures": {"timeout": 1}, "cut_off_share": 0.25}
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
        "epoch 1/2: reward 0.500, 2 trajectories, 25% of answers cut off, 1 failed, 3 tool calls failed, "
        "0:10 elapsed",
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
        "run_started",
        "phase",
        "episode_finished",
        "validated",
        "epoch_started",
        "phase",
        "episode_finished",
        "scored",
        "episode_finished",
        "scored",
        "phase",
        "trained",
        "epoch_started",
        "skipped",
        "message",
        "finished",
    ]
    assert events[8]["failure"] == "timeout: took longer than 5 s"
    assert events[-1] == {"event": "finished", "epochs_trained": 1, "reward": None}


def test_the_live_panel_shows_phase_epoch_episodes_rewards_failures_and_speed():
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    progress = LiveProgress(console, clock=clock)
    progress.run_started("brave-otter", 3, {})
    progress.validated(0, {"avg_reward": 0.25, "num_examples": 512})
    progress.trained(1, {"avg_reward": 0.1})
    progress.trained(2, {"avg_reward": 0.9})
    progress.epoch_started(3, 3)
    progress.phase("collecting", 4)
    clock.advance(5)
    progress.episode_finished(episode(tokens=50))
    progress.episode_finished(episode(tokens=50, failure=Failure("raised", "oops")))
    progress.scored(EvalOutputItem(id="a", score=0.75))
    with console.capture() as capture:
        console.print(progress.render())
    shown = capture.get()
    for text in (
        "etude · brave-otter",
        "collecting",
        "epoch 3/3",
        "2/4 episodes",
        "reward 0.750",
        "last epoch 0.900",
        "1 failed",
        "20 tokens/s",
        "0:05",
        "validation 0.250",
    ):
        assert text in shown


SPENT = {
    "usd": 1.25,
    "tokens": 900,
    "limits": {"budget.usd": [1.25, 20.0], "llms.judge.budget.tokens": [80, 1e6]},
}


def test_displays_show_what_is_spent_of_what():
    stream, clock = io.StringIO(), Clock()
    with LineProgress(stream, clock=clock) as progress:
        progress.spent(SPENT)
        progress.phase("collecting", 2)
        clock.advance(11)
        progress.episode_finished(episode())
    assert (
        stream.getvalue()
        .splitlines()[-1]
        .endswith("tokens/s, usd 1.25 of 20, llms.judge.budget.tokens 80 of 1,000,000")
    )
    console = Console(file=io.StringIO(), width=100)
    live = LiveProgress(console)
    live.spent(SPENT)
    console.print(live.render())
    assert "spent usd 1.25 of 20" in console.file.getvalue()
    live.spent({"usd": 0.0, "tokens": 900, "limits": {}})
    assert live.spending == ""
    live.spent({"usd": 0.5, "tokens": 900, "limits": {}})
    assert live.spending == "$0.50"

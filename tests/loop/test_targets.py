"""The summary of several targets, as a person sees it."""

from etude.core.episode import EpisodeRecord, Example
from etude.core.evaluation import EvalOutputItem
from etude.loop.targets import SharedProgress
from etude.report.progress import RunState


class Counting(RunState):
    """Keeps the phases with the episodes and scores that were told in each."""

    def __init__(self):
        self.phases = []
        super().__init__()

    def phase(self, name, total=None):
        super().phase(name, total)
        self.phases.append([name, total, 0, 0])

    def episode_finished(self, episode):
        super().episode_finished(episode)
        self.phases[-1][2] += 1

    def scored(self, item):
        super().scored(item)
        self.phases[-1][3] += 1


def collect(view, phase, count):
    view.phase("collecting", count)
    for generation in range(count):
        view.episode_finished(EpisodeRecord(f"{phase}/a/{generation}", Example("a"), generation))
        view.scored(EvalOutputItem(id="a", generation=generation, score=1.0))


def test_episodes_that_targets_share_are_told_once():
    counting = Counting()
    shared = SharedProgress(counting)
    shared.epoch_started(0, 2)
    for target in ("prover", "verifier"):
        collect(shared.view(target), "train/1", 4)
    assert counting.phases == [["collecting", 4, 4, 4]]


def test_episodes_of_a_target_that_collects_others_are_told_too():
    counting = Counting()
    shared = SharedProgress(counting)
    for epoch in range(2):
        shared.epoch_started(epoch, 2)
        collect(shared.view("prover"), f"train/{epoch}", 4)
        collect(shared.view("verifier"), f"train/{epoch}-k4", 16)
        collect(shared.view("judge"), f"train/{epoch}-k4", 16)
        shared.phase("training")
    assert (
        counting.phases
        == [["collecting", 4, 4, 4], ["collecting", None, 16, 16], ["training", None, 0, 0]] * 2
    )


def test_episodes_that_a_target_has_beyond_the_shared_ones_are_told_once():
    counting = Counting()
    shared = SharedProgress(counting)
    shared.epoch_started(0, 1)
    collect(shared.view("prover"), "train/1", 4)
    collect(shared.view("verifier"), "train/1", 6)
    collect(shared.view("judge"), "train/1", 2)
    assert counting.phases == [["collecting", 4, 4, 4], ["collecting", None, 2, 2]]

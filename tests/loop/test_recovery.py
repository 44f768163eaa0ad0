"""A run knows where to go back to, and what that takes back."""

import pytest

from etude.core.history import WentBack
from etude.core.job import TrainingJobRef, TrainingJobStatus
from etude.core.records import (
    JobEnded,
    JobPlan,
    JobPlanned,
    LineageEntry,
    MetricsAdded,
    Reopened,
    RunEnded,
    Submission,
    state,
)
from etude.loop.lifecycle import find_recovery
from tests.show.histories import history, version


async def test_whether_the_last_version_is_whole_is_asked_of_the_last_epoch_alone():
    asked = []

    async def find_damage(version):
        asked.append(version.number)
        return []

    assert await find_recovery(state(history([0.5] * 300).epochs), find_damage) is None
    assert asked == [300]


async def test_it_goes_back_to_the_last_version_that_is_whole():
    epochs = history([0.1, 0.2, 0.3, 0.4]).epochs

    async def find_damage(version):
        return [f"v{version.number} is missing"] if version.number > 2 else []

    found = await find_recovery(state(epochs), find_damage)
    assert (found.epoch, found.back_to, found.epochs) == (2, version(2), (3, 4))
    assert (found.lost, found.keeps_warm_up) == ((version(3), version(4)), True)


def test_what_comes_after_a_point_is_taken_back_and_the_numbers_of_planned_versions_stay():
    epochs = history([0.1, 0.2, 0.3]).epochs
    jobs = [TrainingJobRef(run_id=f"job-{number}", backend="fake") for number in range(3)]
    records = [*epochs, *(Submission(ref=ref, epoch=number) for number, ref in enumerate(jobs))]
    ends = [TrainingJobStatus(run_id=ref.run_id, backend="fake", status="completed") for ref in jobs]
    records += [JobEnded(status=status) for status in ends]
    records += [LineageEntry(version=entry.version, job=jobs[0]) for entry in epochs]
    plan = JobPlanned(name="job-2", plan=JobPlan(method="grpo", rows=1, data_hash="", number=3))
    known = state([*records, plan, WentBack(epoch=1, back_to=version(1))])
    assert ([*known.epochs], [*known.versions], [*known.submissions]) == ([1], [1], [(0, 1)])
    assert (known.newest_number, [*known.ended]) == (3, ["job-0"])


@pytest.mark.parametrize(
    ("later", "is_over"),
    [
        (MetricsAdded(epoch=1, metrics={"mine": 1.0}), True),
        (Reopened(settings=("finetuning.num_epochs",)), False),
        (WentBack(epoch=0, back_to=None), False),
        (history([0.1, 0.2]).epochs[1], False),
    ],
)
def test_a_run_is_over_until_it_goes_on(later, is_over):
    records = [*history([0.1]).epochs, RunEnded(), later]
    assert (state(records).end is not None) is is_over
    assert state([*records, RunEnded()]).end is not None

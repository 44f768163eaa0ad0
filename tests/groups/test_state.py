"""A state, the refusal of anything else with its keys, and the lineage of versions."""

from dataclasses import dataclass

import pytest

from etude.core.errors import RequestError, TrainingError
from etude.groups.lineage import check_changed
from etude.groups.state import HostedState, SharedModelGroupState, read_state
from tests.show.histories import version

VERSION = {"number": 3, "location": "weights-3", "digest": "digest-3"}


def hosted(job, model):
    return HostedState(fine_tune_job_id=job, fine_tuned_model_name=model)


def test_its_own_states_are_read_as_they_were_written():
    state = SharedModelGroupState.model_validate({"version": VERSION})
    assert read_state(state) == read_state(state.model_dump()) == read_state({"version": VERSION}) == state
    assert read_state({"fine_tune_job": None, "version": None}) == SharedModelGroupState()


@dataclass
class TheirState:
    """As Neural Interactive Proofs has it."""

    fine_tune_job_id: str | None = None
    fine_tuned_model_name: str | None = None


@pytest.mark.parametrize(
    ("checkpoint", "state"),
    [
        (TheirState("ftjob-1", "ft:gpt"), hosted("ftjob-1", "ft:gpt")),
        ({"fine_tune_job_id": "ftjob-1", "fine_tuned_model_name": None}, hosted("ftjob-1", None)),
        ({"fine_tuned_model_name": "ft:gpt"}, hosted(None, "ft:gpt")),
        (TheirState("frozen_job_id"), hosted(None, None)),
        (TheirState("insufficient_data_job_id", "ft:gpt"), hosted(None, "ft:gpt")),
        (TheirState("dummy_job_id"), hosted(None, None)),
        (TheirState(), hosted(None, None)),
    ],
)
def test_states_of_neural_interactive_proofs_are_understood(checkpoint, state):
    assert read_state(checkpoint) == state


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ({}, "it has no keys, and a state has 'fine_tune_job' and 'version'"),
        ({"iteration": 3, "shared_model_groups": {}}, "it has 'iteration', 'shared_model_groups', and a"),
        ({"fine_tune_job_id": "a", "version": None}, "it has 'fine_tune_job_id', and a state has"),
        ({"fine_tuned_model_nam": "ft:x"}, "it has 'fine_tuned_model_nam', and a state has"),
        ({"version": {"number": 1}}, "wrong 'version.location'"),
        ({"version": VERSION | {"number": -1}}, "wrong 'version.number'"),
        ({"version": "v1"}, "wrong 'version'"),
        ({"fine_tune_job_id": 7}, "wrong 'fine_tune_job_id'"),
        ({"fine_tuned_model_name": ""}, "wrong 'fine_tuned_model_name'"),
        ({"fine_tuned_model_name": "dummy_model_name"}, "stands for a model that was never trained"),
        *((other, "a group's state is a dict, and this is") for other in (["ft:x"], "ft:x", None)),
    ],
)
def test_anything_else_is_refused_with_its_keys(checkpoint, message):
    with pytest.raises(RequestError, match=message):
        read_state(checkpoint)


def test_new_weights_have_another_digest_and_a_higher_number():
    check_changed(None, version(1), "job")
    check_changed(version(0), version(1), "job")
    with pytest.raises(TrainingError, match="job says that it is completed"):
        check_changed(version(1), version(1), "job")
    with pytest.raises(TrainingError, match="count upwards"):
        check_changed(version(2), version(1), "job")
    # A job that starts from the base may make the same weights again.
    again = version(2).model_copy(update={"digest": "digest-1"})
    check_changed(version(1), again, "job", start=version(0))
    with pytest.raises(TrainingError, match="have not changed"):
        check_changed(version(1), again.model_copy(update={"digest": "digest-0"}), "job", start=version(0))

"""A state, and the refusal of anything else with its keys."""

from dataclasses import dataclass

import pytest

from etude.core.errors import RequestError
from etude.groups.state import HostedState, SharedModelGroupState, read_state

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
        ({}, "this is not a group's state: "),
        ({"iteration": 3, "shared_model_groups": {}}, "'iteration': Extra inputs are not permitted"),
        ({"fine_tune_job_id": "a", "version": None}, "'fine_tune_job_id': Extra inputs"),
        ({"fine_tuned_model_nam": "ft:x"}, "'fine_tuned_model_nam': Extra inputs"),
        ({"version": {"number": 1}}, "'version.location': Field required"),
        ({"version": VERSION | {"number": -1}}, "'version.number'"),
        ({"fine_tune_job_id": 7}, "'fine_tune_job_id': "),
        ({"fine_tuned_model_name": ""}, "'fine_tuned_model_name': "),
        ({"fine_tuned_model_name": "dummy_model_name"}, "stands for a model that was never trained"),
        *((other, "this is not a group's state: ") for other in (["ft:x"], "ft:x", None)),
    ],
)
def test_anything_else_is_refused_with_its_keys(checkpoint, message):
    with pytest.raises(RequestError, match=message):
        read_state(checkpoint)

import pytest

from etude.core.errors import TrainingError
from etude.groups.lineage import check_changed
from tests.report.histories import version


def test_new_weights_have_another_digest_and_a_higher_number():
    check_changed(None, version(1), "job")
    check_changed(version(0), version(1), "job")
    with pytest.raises(TrainingError, match="job says that it is completed"):
        check_changed(version(1), version(1), "job")
    with pytest.raises(TrainingError, match="count upwards"):
        check_changed(version(2), version(1), "job")


def test_a_job_that_starts_from_the_base_may_make_the_same_weights_again():
    again = version(2).model_copy(update={"digest": "digest-1"})
    check_changed(version(1), again, "job", start=version(0))
    with pytest.raises(TrainingError, match="have not changed"):
        check_changed(version(1), again.model_copy(update={"digest": "digest-0"}), "job", start=version(0))

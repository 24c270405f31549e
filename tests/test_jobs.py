"""What a job runs, and what its ranks make of a scenario together."""

from __future__ import annotations

import pytest

from tests.jobs import ENDED, Job
from tests.scenarios.common import Skipped, needs
from tests.worker import attempt, is_wanted, together

NAMES = ("sparse.report[tape]", "sparse.report", "state.report_of_a_state")


@pytest.mark.parametrize(("wanted", "found"), [
    ([], NAMES), (["sparse.report"], ["sparse.report"]), (["report"], NAMES), (["nothing"], []),
    (["state."], ["state.report_of_a_state"]),
    (["sparse.report", "of_a"], ["sparse.report", "state.report_of_a_state"])])
def test_scenarios_are_wanted_by_name_or_by_a_part_of_it(wanted, found):
    assert [name for name in NAMES if is_wanted(name, wanted, NAMES)] == list(found)


def test_a_scenario_passes_fails_or_is_skipped_with_the_reason():
    assert attempt(lambda: None) is None
    assert "ZeroDivisionError" in attempt(lambda: 1 / 0)
    assert attempt(lambda: needs(False, "3 ranks")) == {"skipped": "needs 3 ranks"}
    with pytest.raises(Skipped):
        needs(False, "Keras 3")


def test_one_failure_is_that_of_all_and_skipping_must_be_agreed_on():
    skipped = {"skipped": "needs 3 ranks"}
    assert together([None, None]) is None
    assert together([skipped, skipped]) == skipped
    assert together([None, "the traceback", skipped]) == "the traceback"
    assert "do not agree" in together([None, skipped])


def test_jobs_have_names_of_their_own():
    assert str(Job("torch", "gloo", 2)) == "gloo-2"
    assert str(Job("torch", "mpi", 2, kernels="numpy")) == "mpi-2-numpy"
    assert str(Job("tensorflow", "mpi", 4, keras="tf_keras")) == "mpi-4-tf_keras"


@pytest.mark.parametrize(("trouble", "status"), [("", None), ("crash", "status 3"), ("hang", "status -1")])
def test_a_job_that_crashes_or_hangs_at_its_end_has_not_ended(trouble, status):
    found = Job("torch", "mpi", 1).run(["refusals.k_beyond_n_is_refused[optimizer]"], "tests.troubled_worker",
                                         {"TROUBLE": trouble}, timeout=40)
    assert found.pop(ENDED) is None if status is None else status in found.pop(ENDED)
    assert list(found.values()) == [None]

"""Scenarios that a job runs, and the outcome that its ranks have together."""

from __future__ import annotations

import pytest

from tests.jobs import ENDED, Job
from tests.scenarios.common import needs
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


def test_one_failure_is_that_of_all_and_skipping_must_be_agreed_on():
    skipped = {"skipped": "needs 3 ranks"}
    assert together([None, None]) is None
    assert together([skipped, skipped]) == skipped
    assert together([None, "the traceback", skipped]) == "the traceback"
    assert "do not agree" in together([None, skipped])


def troubled(trouble, size, **limits):
    return Job("torch", "mpi", size).run(["first", "second"], "tests.troubled_worker", {"TROUBLE": trouble, **limits},
                                         timeout=200)


@pytest.mark.parametrize(("trouble", "limits", "how"), [
    ("crash at the end", {}, "the job ended with status 3"),
    pytest.param("hang at the end", {"END_LIMIT": "1"}, "the job hung and ended with status 1",
                 marks=pytest.mark.slow)])
def test_a_job_that_crashes_or_hangs_at_its_end_has_not_ended(trouble, limits, how):
    found = troubled(trouble, 1, **limits)
    assert found.pop(ENDED).startswith(how)
    assert found == {"first": None, "second": None}


@pytest.mark.parametrize(("trouble", "begins", "says"), [
    ("crash", "ended the job: first; the job ended with status 3", ["exit code"]),
    pytest.param("hang", "hung: first; the job hung and ended with status 1", ["in first", "in allgather_object"],
                 marks=pytest.mark.slow),
    pytest.param("failure", "hung: first; the job hung and ended with status 1", ["rank 1 has no such thing"],
                 marks=pytest.mark.slow)])
def test_a_scenario_that_ends_its_job_or_hangs_is_named(trouble, begins, says):
    found = troubled(trouble, 2, SCENARIO_LIMIT="4")
    assert found["first"].startswith(begins)
    assert all(each in found["first"] for each in says)
    assert found["second"] == "did not run after first"
    assert found[ENDED].startswith("the job ")

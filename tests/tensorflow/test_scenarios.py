"""Every scenario under real horovodrun, with both Keras: MPI and Gloo, on 1, 2 and 4 ranks; one launch a job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.jobs import Job, cases
from tests.scenarios import names

THE_REST = Job("tensorflow", "mpi", 2)
"""What takes too long for `make test`: of StepAhead."""
KINDS = {
    THE_REST: (),
    Job("tensorflow", "mpi", 2, quick=True): ("tape",),
    Job("tensorflow", "gloo", 2, quick=True): ("keras",),
    Job("tensorflow", "gloo", 2): ("keras",),
    Job("tensorflow", "mpi", 1): ("function",),
    Job("tensorflow", "mpi", 2, keras="tf_keras"): ("keras", "legacy"),
    Job("tensorflow", "mpi", 4): ("keras",),
}
"""Kinds of training by job: all of them everywhere would take too long."""
ON_FOUR = ("sparse.", "buckets.", "partial.nothing", "step_ahead.every_scheme", "step_ahead.dense")
"""What depends most on how many ranks there are."""
ALONE = ("keras_fit.", "refused.", "partial.", "step_ahead_models.")
"""Of what TensorFlow has of its own, what one rank is tried with."""
STEP_AHEAD = ("step_ahead.", "step_ahead_models.")
QUICK_STEP_AHEAD = ("step_ahead.dense", "step_ahead_models.fit_shows")
"""Of StepAhead, what `make test` has, and what is tried over Gloo."""


def belongs(job: Job, name: str) -> bool:
    """Whether a job has a scenario. Partial rounds need MPI and Keras 3. What TensorFlow has of its own is little
    concerned with the network: it runs over MPI, on two ranks, and in part on one."""
    if name.startswith(STEP_AHEAD):
        return has_step_ahead(job, name)
    if job == THE_REST:
        return False
    if name.startswith("partial.") and (job.backend, job.keras) != ("mpi", "keras3"):
        return False
    if job.backend == "gloo" and job.quick != name.startswith("sparse."):
        return False
    if job.size == 4:
        return name.startswith(ON_FOUR)
    if name.endswith("]"):
        return True
    return job.backend == "mpi" and (job.size > 1 or name.startswith(ALONE))


def has_step_ahead(job: Job, name: str) -> bool:
    """The same, for what is about StepAhead."""
    is_quick = name.startswith(QUICK_STEP_AHEAD)
    if job.size != 2:
        return name.startswith(ON_FOUR if job.size == 4 else ALONE)
    if job.backend == "gloo" or job.quick:
        return is_quick and job.quick == (job.backend == "mpi")
    return not is_quick or job != THE_REST


JOBS = {job: [name for name in names("tensorflow", kinds) if belongs(job, name)] for job, kinds in KINDS.items()}


@pytest.mark.timeout(660)  # the first of a job waits for all of them
@cases(JOBS)
def test_scenario(job: Job, scenario: str, run_scenario: Callable[[Job, str], None]) -> None:
    run_scenario(job, scenario)

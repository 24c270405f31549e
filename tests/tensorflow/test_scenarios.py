"""Every scenario under real horovodrun, with both Keras: MPI and Gloo, on 1, 2 and 4 ranks; one launch a job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.jobs import Job, cases
from tests.scenarios import names

KINDS = {
    Job("tensorflow", "mpi", 2, quick=True): ("tape",),
    Job("tensorflow", "gloo", 2, quick=True): ("keras",),
    Job("tensorflow", "gloo", 2): ("keras",),
    Job("tensorflow", "mpi", 2): (),
    Job("tensorflow", "mpi", 1): ("function",),
    Job("tensorflow", "mpi", 2, keras="tf_keras"): ("keras", "legacy"),
    Job("tensorflow", "mpi", 4): ("keras",),
}
"""Kinds of training by job: all of them everywhere would take too long."""
ON_FOUR = ("sparse.", "buckets.", "partial.nothing")
"""What depends most on how many ranks there are."""
ALONE = ("keras_fit.", "refused.", "partial.")
"""Of what TensorFlow has of its own, what one rank is tried with."""
QUICK_AHEAD = ("step_ahead.every_scheme_keeps_the_shared_parameters_equal_at_every_step",
               "step_ahead_models.fit_shows_what_ranks_share_in_validation_and_callbacks_and_at_the_end")
"""Of StepAhead, what `make test` has."""


def belongs(job: Job, name: str) -> bool:
    """Whether a job has a scenario. Partial rounds need MPI and Keras 3. What TensorFlow has of its own is little
    concerned with the network: it runs over MPI, on two ranks, and in part on one."""
    if name.startswith("partial.") and (job.backend, job.keras) != ("mpi", "keras3"):
        return False
    if job.backend == "gloo" and job.quick != name.startswith("sparse."):
        return False
    if (job.backend, job.size, job.keras) == ("mpi", 2, "keras3") and name.startswith("step_ahead"):
        return job.quick == (name in QUICK_AHEAD)
    if job == Job("tensorflow", "mpi", 2):
        return False
    if job.size == 4:
        return name.startswith(ON_FOUR)
    if name.endswith("]"):
        return True
    return job.backend == "mpi" and (job.size > 1 or name.startswith(ALONE))


JOBS = {job: [name for name in names("tensorflow", kinds) if belongs(job, name)] for job, kinds in KINDS.items()}


@pytest.mark.timeout(660)  # the first of a job waits for all of them
@cases(JOBS)
def test_scenario(job: Job, scenario: str, run_scenario: Callable[[Job, str], None]) -> None:
    run_scenario(job, scenario)

"""Every scenario under real horovodrun, with both Keras: MPI and Gloo, on 1, 2 and 4 ranks; one launch a job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.jobs import Job, cases
from tests.scenarios import names

KINDS = {
    Job("tensorflow", "mpi", 2, quick=True): ("tape",),
    Job("tensorflow", "mpi", 2): (),
    Job("tensorflow", "gloo", 2): ("keras",),
    Job("tensorflow", "mpi", 1): ("function",),
    Job("tensorflow", "mpi", 2, keras="tf_keras"): ("keras", "legacy"),
    Job("tensorflow", "mpi", 4): ("keras",),
}
"""Kinds of training by job: all of them everywhere would take too long."""
ON_FOUR = ("sparse.", "buckets.", "partial.nothing")
"""What depends most on how many ranks there are."""
ALONE = ("keras_fit.", "refused.", "partial.")
"""Of what TensorFlow has of its own, what one rank is tried with."""
NOT_QUICK = ("own_optimizers.", "sessions.", "step_ahead")
"""Of what it has of its own, what `make test` leaves out on two ranks over MPI, but for:"""
QUICK = ("own_optimizers.a_gan_starts_alike_with_the_state_of_its_own_optimizers",
         "sessions.a_session_of_tensorflow_1", "sessions.two_optimizers_in_one_run",
         "step_ahead.every_scheme_keeps_the_shared_parameters_equal_at_every_step",
         "step_ahead_models.fit_shows_what_ranks_share_in_validation_and_callbacks_and_at_the_end")


def belongs(job: Job, name: str) -> bool:
    """Whether a job has a scenario. Partial rounds need MPI and Keras 3. What TensorFlow has of its own is little
    concerned with the network: it runs over MPI, on two ranks, and in part on one."""
    if name.startswith("partial.") and (job.backend, job.keras) != ("mpi", "keras3"):
        return False
    if job.size == 4:
        return name.startswith(ON_FOUR)
    if name.endswith("]"):
        return True
    if (job.backend, job.size, job.keras) == ("mpi", 2, "keras3"):
        return job.quick == (name in QUICK or not name.startswith(NOT_QUICK))
    return job.backend == "mpi" and (job.size > 1 or name.startswith(ALONE))


JOBS = {job: [name for name in names("tensorflow", kinds) if belongs(job, name)] for job, kinds in KINDS.items()}


@pytest.mark.timeout(660)  # the first of a job waits for all of them
@cases(JOBS)
def test_scenario(job: Job, scenario: str, run_scenario: Callable[[Job, str], None]) -> None:
    run_scenario(job, scenario)

"""Every scenario under real horovodrun, with both Keras: MPI and Gloo, on 1, 2 and 4 ranks; one launch a job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.jobs import Job, cases
from tests.scenarios import names

KINDS = {
    Job("tensorflow", "mpi", 2, quick=True): ("function",),
    Job("tensorflow", "mpi", 2): (),
    Job("tensorflow", "gloo", 2): ("keras",),
    Job("tensorflow", "mpi", 1): ("tape",),
    Job("tensorflow", "mpi", 2, keras="tf_keras"): ("keras",),
    Job("tensorflow", "mpi", 4): ("keras",),
}
"""Kinds of training by job: all of them everywhere would take too long."""
ON_FOUR = ("sparse.", "hosts.", "transport.", "features.process_set", "features.a_rank_outside", "partial.nothing",
           "step_ahead.every_", "step_ahead.dense", "step_ahead.one_rank_alone", "step_ahead.a_worker",
           "step_ahead_hosts.")
"""What depends most on how many ranks there are."""
ALONE = ("keras_fit.", "refused.", "partial.", "step_ahead_models.")
"""Of what TensorFlow has of its own, what one rank is tried with."""
NOT_QUICK = ("lifetime.", "own_optimizers.", "step_ahead")
"""Of what it has of its own, what `make test` leaves out on two ranks over MPI, but for:"""
QUICK = ("own_optimizers.a_gan_starts_alike", "step_ahead.the_learning_rate", "step_ahead_models.fit_shows",
         "step_ahead_hosts.the_ranks_of_a_host")
OVER_GLOO = ("lifetime.", "step_ahead_models.fit_shows", "step_ahead_hosts.")
"""Of what it has of its own, what is concerned with the network."""


def belongs(job: Job, name: str) -> bool:
    """Whether a job has a scenario. Partial rounds need MPI and Keras 3. What TensorFlow has of its own is little
    concerned with the network: it runs over MPI, on two ranks, and in part on one."""
    if name.startswith("partial.") and (job.backend, job.keras) != ("mpi", "keras3"):
        return False
    if job.size == 4:
        return name.startswith(ON_FOUR)
    if name.endswith("]"):
        return True
    if job.backend == "gloo":
        return name.startswith(OVER_GLOO)
    if (job.size, job.keras) == (2, "keras3"):
        return job.quick == (name.startswith(QUICK) or not name.startswith(NOT_QUICK))
    return job.size > 1 or name.startswith(ALONE)


JOBS = {job: [name for name in names("tensorflow", kinds) if belongs(job, name)] for job, kinds in KINDS.items()}


@pytest.mark.timeout(660)  # the first of a job waits for all of them
@cases(JOBS)
def test_scenario(job: Job, scenario: str, run_scenario: Callable[[Job, str], None]) -> None:
    run_scenario(job, scenario)

"""Every scenario under real horovodrun, over MPI and Gloo; one launch for each job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.jobs import Job, cases
from tests.scenarios import WHERE_RANKS_MATTER, names

ALL = names("torch")
SPARSE = [name for name in ALL if name.startswith("sparse.") and name.endswith("]")]
NETWORK = [name for name in ALL if name.startswith(WHERE_RANKS_MATTER)]
OVER_MPI_ALONE = ("partial.", "step_ahead.every_scheme", "step_ahead.one_rank_alone")
"""Partial rounds need MPI. The others are long, and one more network shows nothing new in them."""
LIFETIME = [name for name in ALL if name.startswith("lifetime.")]
"""A hundred models each."""
QUICK = [name for name in ALL if name not in LIFETIME]

JOBS = {
    Job("torch", "mpi", 2, quick=True): QUICK,
    Job("torch", "mpi", 2): LIFETIME,
    Job("torch", "mpi", 2, kernels="numpy"): SPARSE,
    Job("torch", "gloo", 2): [name for name in NETWORK if not name.startswith(OVER_MPI_ALONE)],
    Job("torch", "mpi", 1): [name for name in ALL if name.startswith((*WHERE_RANKS_MATTER, "features.", "hooks."))],
    Job("torch", "mpi", 4): [name for name in ALL
                             if name.startswith((*WHERE_RANKS_MATTER, "partial.", "overlapping_sets."))],
}
"""Scenarios by job. Three ranks of Gloo on two cores take a hundred times as long as two, now and then: elastic jobs
of test_failures.py have them."""


@pytest.mark.timeout(1560)  # the first of a job waits for all of them
@cases(JOBS)
def test_scenario(job: Job, scenario: str, run_scenario: Callable[[Job, str], None]) -> None:
    run_scenario(job, scenario)

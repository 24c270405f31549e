"""Every scenario under real horovodrun, over MPI and Gloo; one launch for each job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.jobs import Job, cases
from tests.scenarios import names

ALL = names("torch")
WITHOUT_PARTIAL = [name for name in ALL if not name.startswith("partial.")]
SHARED = [name for name in WITHOUT_PARTIAL if name.endswith("]")]
"""What both frameworks have."""
SPARSE = [name for name in SHARED if name.startswith("sparse.")]
LIFETIME = [name for name in ALL if name.startswith("lifetime.")]
"""A hundred models each."""
QUICK = [name for name in ALL if name not in LIFETIME]

JOBS = {
    Job("torch", "mpi", 2, quick=True): QUICK,
    Job("torch", "mpi", 2): LIFETIME,
    Job("torch", "gloo", 2, quick=True): SPARSE,
    Job("torch", "mpi", 2, kernels="numpy"): SPARSE,
    Job("torch", "gloo", 2): [name for name in WITHOUT_PARTIAL if name not in SPARSE],
    Job("torch", "mpi", 1): QUICK,
    Job("torch", "mpi", 3): [name for name in SHARED if not name.startswith("step_ahead")],
    Job("torch", "mpi", 4): [*SHARED, *(name for name in ALL if name.startswith(("partial.", "step_ahead_hosts.")))],
}
"""Scenarios by job. Partial rounds need MPI. Three ranks of Gloo on two cores take a hundred times as long as two,
now and then: test_failures.py has them."""


@pytest.mark.timeout(660)  # the first of a job waits for all of them
@cases(JOBS)
def test_scenario(job: Job, scenario: str, run_scenario: Callable[[Job, str], None]) -> None:
    run_scenario(job, scenario)

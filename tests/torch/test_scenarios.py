"""Every scenario under real horovodrun, over MPI and Gloo; one launch for each number of ranks."""

from __future__ import annotations

import pytest

from tests.launch import outcomes
from tests.scenarios import names

ALL = tuple(names("torch"))
WITHOUT_PARTIAL = tuple(name for name in ALL if not name.startswith("partial."))
JOBS = {("mpi", 1): ALL, ("mpi", 2): ALL, ("mpi", 3): WITHOUT_PARTIAL, ("mpi", 4): ALL,
        ("gloo", 2): WITHOUT_PARTIAL}
"""Scenarios by job. Partial rounds need MPI. Three ranks of Gloo on two cores take a hundred times as long as two,
now and then: test_failures.py has them."""


@pytest.mark.timeout(600)  # the first of a job waits for all of them
@pytest.mark.parametrize(("backend", "size", "scenario"), [(*job, name) for job in JOBS for name in JOBS[job]])
def test_scenario(backend: str, size: int, scenario: str) -> None:
    failure = outcomes("torch", backend, size, JOBS[backend, size])[scenario]
    assert failure is None, failure

"""Every scenario under real horovodrun, over MPI and Gloo; one launch for each number of ranks."""

from __future__ import annotations

import pytest

from tests.launch import outcomes
from tests.scenarios import names


@pytest.mark.timeout(600)  # the first of a job waits for all of them
@pytest.mark.parametrize("scenario", names("torch"))
@pytest.mark.parametrize(("backend", "size"), [*(("mpi", p) for p in (1, 2, 3, 4)), ("gloo", 2), ("gloo", 3)])
def test_scenario(backend: str, size: int, scenario: str) -> None:
    failure = outcomes("torch", backend, size)[scenario]
    assert failure is None, failure

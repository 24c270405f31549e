"""Every scenario under real horovodrun: MPI and Gloo, on 1 to 4 ranks; one launch for each pair."""

from __future__ import annotations

import pytest

from tests.launch import outcomes
from tests.scenarios import names


@pytest.mark.timeout(600)  # the first of a job waits for all of them
@pytest.mark.parametrize("scenario", names("torch"))
@pytest.mark.parametrize(("backend", "size"), [(b, p) for b in ("mpi", "gloo") for p in (1, 2, 3, 4)])
def test_scenario(backend: str, size: int, scenario: str) -> None:
    failure = outcomes("torch", backend, size)[scenario]
    assert failure is None, failure

"""Every scenario under real horovodrun, with both Keras: MPI and Gloo, on 1 to 4 ranks; one launch for each."""

from __future__ import annotations

import pytest

from tests.launch import outcomes
from tests.scenarios import names

JOBS = [("mpi", 1, "keras3"), ("mpi", 2, "tf_keras"), ("mpi", 3, "keras3"), ("mpi", 4, "keras3"),
        ("gloo", 2, "keras3"), ("gloo", 3, "tf_keras")]


@pytest.mark.timeout(600)  # the first of a job waits for all of them
@pytest.mark.parametrize("scenario", names("tensorflow"))
@pytest.mark.parametrize(("backend", "size", "keras"), JOBS)
def test_scenario(backend: str, size: int, keras: str, scenario: str) -> None:
    failure = outcomes("tensorflow", backend, size, TF_USE_LEGACY_KERAS=str(int(keras == "tf_keras")))[scenario]
    assert failure is None, failure

"""Every scenario under real horovodrun, with both Keras: MPI and Gloo, on 1, 2 and 4 ranks; one launch a job."""

from __future__ import annotations

import pytest

from tests.launch import outcomes
from tests.scenarios import names

JOBS = {("mpi", 1, "keras3"): ("function",), ("mpi", 2, "tf_keras"): ("keras", "legacy"),
        ("mpi", 2, "keras3"): ("tape",), ("mpi", 4, "keras3"): ("keras",), ("gloo", 2, "keras3"): ("keras",)}
"""Kinds of training by job: all of them everywhere would take too long."""
ON_FOUR = ("sparse.", "groups.", "partial.nothing")
"""What depends most on how many ranks there are."""
ALONE = ("keras_fit.", "refused.", "partial.")
"""Of what TensorFlow has of its own, what one rank is tried with."""


def wanted(job: tuple[str, int, str]) -> tuple[str, ...]:
    """The scenarios of a job; partial rounds need MPI and Keras 3. What TensorFlow has of its own is little concerned
    with the network: it runs over MPI, on two ranks, and in part on one."""
    backend, size, keras = job

    def belongs(name: str) -> bool:
        if name.startswith("partial.") and (backend, keras) != ("mpi", "keras3"):
            return False
        if size == 4:
            return name.startswith(ON_FOUR)
        if name.endswith("]"):
            return True
        return backend == "mpi" and (size > 1 or name.startswith(ALONE))

    return tuple(filter(belongs, names("tensorflow", JOBS[job])))


CASES = [(*job, scenario) for job in JOBS for scenario in wanted(job)]


@pytest.mark.timeout(600)  # the first of a job waits for all of them
@pytest.mark.parametrize(("backend", "size", "keras", "scenario"), CASES)
def test_scenario(backend: str, size: int, keras: str, scenario: str) -> None:
    names_of_job = wanted((backend, size, keras))
    legacy = str(int(keras == "tf_keras"))
    found = outcomes("tensorflow", backend, size, names_of_job, TF_USE_LEGACY_KERAS=legacy)
    assert found[scenario] is None, found[scenario]

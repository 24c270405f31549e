"""The adviser measures the network of a real job."""

from __future__ import annotations

import pytest

from tests.launch import horovodrun


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_the_network_of_a_job_is_measured(backend: str) -> None:
    job = horovodrun(backend, 2, "-m", "horovod_oktopk", "advise", "--parameters", "100000", "--measure", timeout=100)
    assert job.returncode == 0, job.output
    assert job.output.count("100,000 parameters, 2 ranks, density 0.01; ") == 1
    assert "OkTopk" in job.output

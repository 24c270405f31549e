"""A bucket is reduced while the backward pass still runs; a job of its own, as that takes more than one thread."""

from __future__ import annotations

import pytest

from tests.launch import horovodrun


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_a_bucket_is_reduced_while_the_backward_pass_still_runs(backend: str) -> None:
    job = horovodrun(backend, 2, "-m", "tests.tensorflow.overlap_worker", timeout=120)
    assert job.returncode == 0, job.output[-3000:]
    assert job.output.count("buckets reduced in the backward pass: [1, 1, 1]") == 2, job.output[-3000:]

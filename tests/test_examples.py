"""The examples train, on two ranks, and learn the digits."""

from __future__ import annotations

import re

import pytest

from tests.launch import horovodrun


@pytest.mark.parametrize("framework", ["pytorch", "keras", "tensorflow"])
def test_the_example_learns_the_digits(framework: str) -> None:
    job = horovodrun("mpi", 2, f"examples/minimal_{framework}.py")
    assert job.returncode == 0, job.output
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)%", job.output)  # from one rank
    assert float(accuracy) > 90

"""The examples train, on two ranks, and learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import horovodrun


@pytest.mark.parametrize("name", ["pytorch", "keras", "tensorflow", "step_ahead"])
def test_the_example_learns_the_digits(name: str) -> None:
    job = horovodrun("mpi", 2, f"examples/minimal_{name}.py")
    assert job.returncode == 0, job.output
    accuracies = re.findall(r"test accuracy ([\d.]+)%", job.output)  # from one rank
    assert float(accuracies[-1]) > 90


def train_transformer(checkpoint: Path, *more: str) -> list[tuple[int, float]]:
    """(epoch, validation loss) of each."""
    job = horovodrun("mpi", 2, "examples/transformer.py", "--epochs", "2", "--steps", "25", "--batch-size", "4",
                     "--compression", "step-ahead", "--checkpoint", str(checkpoint), *more)
    assert job.returncode == 0, job.output
    lines = re.findall(r"epoch (\d+): validation loss ([\d.]+)", job.output)
    return [(int(epoch), float(loss)) for epoch, loss in lines]


def test_the_transformer_learns_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    first, second = train_transformer(tmp_path / "whole")
    assert (first[0], second[0]) == (1, 2)
    assert 5.6 > first[1] > second[1]  # log(256) is 5.55
    (interrupted,) = train_transformer(tmp_path / "part", "--stop-after", "1")
    assert interrupted == first
    ((epoch, loss),) = train_transformer(tmp_path / "part")
    # One file holds the optimizer state of rank 0 alone, and all go on from that.
    assert (epoch, loss) == (2, pytest.approx(second[1], abs=0.02))

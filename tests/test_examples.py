"""The examples train, on two ranks, and learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import ROOT, Finished, horovodrun, torchrun


@pytest.mark.parametrize("name", ["minimal_pytorch", "minimal_keras", "minimal_tensorflow", "cnn_pytorch",
                                  "partial_pytorch"])
def test_the_example_learns_the_digits(name: str) -> None:
    assert accuracy_of(horovodrun("mpi", 2, f"examples/{name}.py")) > 90


def test_the_example_for_torchrun_learns_the_digits() -> None:
    assert accuracy_of(torchrun(2, "examples/minimal_torchrun.py")) > 90


def test_a_second_run_of_the_keras_example_goes_on_from_the_first(tmp_path: Path) -> None:
    command = ("examples/resume_keras.py", "--folder", str(tmp_path), "--epochs")
    interrupted = horovodrun("mpi", 2, *command, "2")
    assert epochs_of(interrupted) == ["1/2", "2/2"]
    resumed = horovodrun("mpi", 2, *command, "5")
    assert epochs_of(resumed) == ["3/5", "4/5", "5/5"]
    assert accuracy_of(resumed) > max(90, accuracy_of(interrupted))


def accuracy_of(job: Finished) -> float:
    """Return the last accuracy, in per cent; one rank reports it."""
    assert job.returncode == 0, job.output
    return float(re.findall(r"test accuracy ([\d.]+)%", job.output)[-1])


def epochs_of(job: Finished) -> list[str]:
    """Return the epochs that Keras reports, from one rank."""
    return re.findall(r"Epoch (\d+/\d+)", job.output)


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name)
def test_the_table_of_examples_has_it_and_a_test_starts_it(path: Path) -> None:
    assert f"| `{path.name}` |" in (ROOT / "examples/README.md").read_text()
    tests = "".join((ROOT / f"tests/test_{name}.py").read_text() for name in ("examples", "launchers"))
    assert path.stem in tests


def train_transformer(checkpoint: Path, *more: str) -> list[tuple[int, float]]:
    """Return (epoch, validation loss) of each epoch."""
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

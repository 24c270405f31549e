"""The ways in which people start Horovod: each trains on two ranks, and comes to the same loss, to its last digit.

And trainers, under Horovod and under torchrun.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest

from tests.launch import BIN, ROOT, Finished, environment, horovodrun, torchrun

DIGITS = "examples/launch_digits.py"
HOROVODRUN = (str(BIN / "horovodrun"), "-np", "2", "-H", "localhost:2")
PACKAGES = "requirements/environment.txt has it"

OFFLINE = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
PATIENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "150"}
"""Seconds in which the ranks must find each other: on a busy machine Ray's start further apart than Gloo's 30."""

Launch = Callable[[], Finished]
pytestmark = pytest.mark.xdist_group("launchers")  # one process, so that the reference is run once


def run(*command: str) -> Finished:
    """Run a launcher to its end."""
    job = subprocess.run(command, env=environment() | OFFLINE | PATIENT, cwd=ROOT, text=True, timeout=800,
                         check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return Finished(job.returncode, job.stdout)


def python(program: str, *arguments: str) -> Launch:
    return lambda: run(sys.executable, f"examples/{program}", *arguments)


def needs_module(name: str) -> None:
    if importlib.util.find_spec(name) is None and os.environ.get("CI") != "true":
        pytest.skip(f"needs the package {name}: {PACKAGES}")


def needs_spark() -> None:
    needs_module("pyspark")
    if shutil.which("java") is None:
        pytest.skip("needs Java 17; on Debian: apt-get install default-jre-headless")


def needs_slurm() -> None:
    if shutil.which("srun") is None or run("sinfo", "--noheader").returncode != 0:
        pytest.skip("needs a Slurm cluster with PMIx; on Debian: slurmctld, slurmd, munge and libpmix-dev")


def needs_nothing() -> None:
    """Need only what the environment always has."""


LAUNCHERS: dict[str, tuple[Callable[[], None], Launch, str]] = {
    "horovodrun-gloo": (needs_nothing, lambda: run(*HOROVODRUN, "--gloo", sys.executable, DIGITS), "Gloo"),
    "mpirun": (needs_nothing, lambda: run(str(BIN / "mpirun"), "-np", "2", sys.executable, DIGITS), "MPI"),
    "srun": (needs_slurm, lambda: run("srun", "--ntasks", "2", "--mpi=pmix", sys.executable, DIGITS), "MPI"),
    "run-mpi": (needs_nothing, python("launch_run.py"), "MPI"),
    "ray": (lambda: needs_module("ray"), python("launch_ray.py"), "Gloo"),
    "spark": (needs_spark, python("launch_spark.py"), "Gloo"),
}
"""Launchers: what each needs, how it starts, and what Horovod runs on."""


def results(job: Finished) -> list[tuple[str, str, str]]:
    """Return of each rank the accuracy, the loss to its last digit, and what Horovod runs on."""
    assert job.returncode == 0, job.output
    told = r"rank (\d): test accuracy ([\d.]+)%, loss ([\d.e-]+), Horovod on (MPI|Gloo)"
    found = re.findall(told, job.output)
    assert sorted(rank for rank, *_ in found) == ["0", "1"], job.output
    return [(accuracy, loss, network) for _, accuracy, loss, network in found]


@cache
def reference() -> tuple[str, str]:
    """Return the accuracy and the loss under `horovodrun --mpi`, the same on both ranks."""
    first, second = results(run(*HOROVODRUN, "--mpi", sys.executable, DIGITS))
    assert first == second
    assert first[2] == "MPI"
    return first[:2]


@pytest.mark.slow
@pytest.mark.timeout(1500)  # the reference, and Ray, which takes minutes where other tests keep the cores busy
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_launcher_comes_to_the_loss_of_horovodrun(launcher: str) -> None:
    needs, launch, network = LAUNCHERS[launcher]
    needs()
    accuracy, loss = reference()
    assert float(accuracy) > 90
    assert results(launch()) == [(accuracy, loss, network)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("program", "package", "backend"), [
    ("trainer_lightning.py", "lightning", "gloo"),
    ("trainer_huggingface.py", "transformers", "mpi"),
])
def test_the_trainer_learns_the_digits_and_keeps_replicas_equal(program: str, package: str, backend: str) -> None:
    needs_module(package)
    job = horovodrun(backend, 2, f"examples/{program}", extra=OFFLINE)
    assert job.returncode == 0, job.output
    found = re.findall(r"rank (\d): {([^}]*)}", job.output)
    assert sorted(rank for rank, _ in found) == ["0", "1"], job.output
    first, second = (dict(re.findall(r"'(?:eval_)?(accuracy|loss)': '?(?:np\.float\d+\()?([\d.e-]+)", metrics))
                     for _, metrics in found)
    assert first == second
    assert first.keys() == {"accuracy", "loss"}
    assert float(first["accuracy"]) > 0.85


@pytest.mark.slow
@pytest.mark.parametrize(("program", "package"), [
    ("torchrun_accelerate.py", "accelerate"),
    ("torchrun_lightning.py", "lightning"),
    ("torchrun_fabric.py", "lightning"),
    ("torchrun_huggingface.py", "transformers"),
])
def test_the_trainer_under_torchrun_learns_the_digits_and_keeps_replicas_equal(program: str, package: str) -> None:
    needs_module(package)
    job = torchrun(2, f"examples/{program}", extra=OFFLINE)
    assert job.returncode == 0, job.output
    found = re.findall(r"rank (\d): test accuracy ([\d.]+)%, loss ([\d.e-]+)", job.output)
    assert sorted(rank for rank, *_ in found) == ["0", "1"], job.output  # and not two jobs of one process
    first, second = ((float(accuracy), float(loss)) for _, accuracy, loss in found)
    assert first == second
    assert first[0] > 90
    if package == "transformers":  # its evaluation after the last epoch was of the shared parameters, too
        assert float(re.findall(r"'eval_loss': '?([\d.e-]+)", job.output)[-1]) == pytest.approx(first[1], abs=1e-3)

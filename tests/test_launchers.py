"""The ways in which people start Horovod: each trains for real on two ranks, and comes to the same bits."""

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

from tests.launch import BIN, ROOT, Finished, environment, horovodrun

DIGITS = "examples/launch_digits.py"
PACKAGES = "requirements/environment.txt has it"

OFFLINE = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}

Launch = Callable[[], Finished]


def run(*command: str) -> Finished:
    """Runs a launcher other than horovodrun, to its end."""
    job = subprocess.run(command, env=environment() | OFFLINE, cwd=ROOT, text=True, timeout=280, check=False,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
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
    """What the environment always has."""


LAUNCHERS: dict[str, tuple[Callable[[], None], Launch, str]] = {
    "horovodrun-gloo": (needs_nothing, lambda: horovodrun("gloo", 2, DIGITS), "Gloo"),
    "mpirun": (needs_nothing, lambda: run(str(BIN / "mpirun"), "-np", "2", sys.executable, DIGITS), "MPI"),
    "srun": (needs_slurm, lambda: run("srun", "--ntasks", "2", "--mpi=pmix", sys.executable, DIGITS), "MPI"),
    "run-mpi": (needs_nothing, python("launch_run.py"), "MPI"),
    "ray": (lambda: needs_module("ray"), python("launch_ray.py"), "Gloo"),
    "spark": (needs_spark, python("launch_spark.py"), "Gloo"),
}
"""What a launcher needs, how it starts, and what Horovod runs on."""


def results(job: Finished) -> list[tuple[str, str, str]]:
    """Of each rank: the accuracy, the digest of its parameters, and what Horovod runs on."""
    assert job.returncode == 0, job.output
    told = r"rank (\d): test accuracy ([\d.]+)%, parameters (\w{16}), Horovod on (MPI|Gloo)"
    found = re.findall(told, job.output)
    assert sorted(rank for rank, *_ in found) == ["0", "1"], job.output
    return [(accuracy, digest, network) for _, accuracy, digest, network in found]


@cache
def reference() -> tuple[str, str]:
    """The accuracy and the digest under `horovodrun --mpi`, the same on both ranks."""
    first, second = results(horovodrun("mpi", 2, DIGITS))
    assert first == second
    assert first[2] == "MPI"
    return first[:2]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_launcher_comes_to_the_bits_of_horovodrun(launcher: str) -> None:
    needs, launch, network = LAUNCHERS[launcher]
    needs()
    accuracy, digest = reference()
    assert float(accuracy) > 90
    assert results(launch()) == [(accuracy, digest, network)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("program", "package", "backend"), [
    ("trainer_lightning.py", "lightning", "gloo"),
    ("trainer_huggingface.py", "transformers", "mpi"),
])
def test_the_trainer_learns_the_digits_and_keeps_replicas_equal(program: str, package: str, backend: str) -> None:
    needs_module(package)
    job = horovodrun(backend, 2, f"examples/{program}", extra=OFFLINE)
    assert job.returncode == 0, job.output
    found = re.findall(r"rank (\d): [^}]*accuracy': ([\d.]+),[^}]*norm': ([\d.]+)", job.output)
    assert sorted(rank for rank, *_ in found) == ["0", "1"], job.output
    (accuracy, norm), other = (values for _, *values in found)
    assert [accuracy, norm] == other
    assert float(accuracy) > 0.85

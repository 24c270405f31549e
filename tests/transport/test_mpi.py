"""The conformance programs over MPI: one launch for each number of ranks, one test for each program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from .endings import ENDINGS
from .programs import PROGRAMS, WITH_SIGNALS

ALL = (*PROGRAMS, *WITH_SIGNALS, *ENDINGS)
ROOT = Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
MISSING = MPIRUN is None or find_spec("mpi4py") is None
# Continuous integration has both: there, what is missing fails.
pytestmark = pytest.mark.skipif(MISSING and os.environ.get("CI") != "true", reason="needs mpi4py and mpirun")


@cache
def results(size: int) -> dict[str, str]:
    """Return what every program gave, or why the launch itself failed."""
    command = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-np", str(size),
               sys.executable, "-m", "tests.transport.mpi_main"]
    environment = os.environ | {"OMPI_MCA_mpi_yield_when_idle": "1"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        return dict.fromkeys(ALL, f"the launch hangs: {error.stdout!r} {error.stderr!r}")
    if done.returncode:
        return dict.fromkeys(ALL, f"the launch failed: {done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("program", ALL)
@pytest.mark.parametrize("size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def test_conformance(size, program):
    if size == 1 and program in ENDINGS:
        pytest.skip("a rank that is alone waits for nobody")
    assert results(size)[program] == "ok"

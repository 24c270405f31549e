"""Starts real `horovodrun` jobs."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Finished:
    """A job that has ended; output: stdout and stderr of all ranks together; returncode: -1 if it had to be ended."""

    returncode: int
    output: str


def environment() -> dict[str, str]:
    """The environment of a job whose ranks outnumber the cores, as root or not."""
    changes = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
               "OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
               "TF_CPP_MIN_LOG_LEVEL": "3"}
    if os.geteuid() == 0:
        changes |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **changes}


def horovodrun(backend: str, size: int, *command: str, timeout: float = 240, flags: tuple[str, ...] = (),
               extra: Mapping[str, str] | None = None) -> Finished:
    """Runs `python command...` on `size` ranks of this machine; backend: "mpi" or "gloo"."""
    hosts = () if flags else ("-H", f"localhost:{size}")
    line = [str(BIN / "horovodrun"), "-np", str(size), *hosts, f"--{backend}", *flags, sys.executable, *command]
    with subprocess.Popen(line, env={**environment(), **(extra or {})}, cwd=ROOT, text=True, start_new_session=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        try:
            output, _ = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _end(job)
            output, _ = job.communicate()
            return Finished(-1, f"{output}\nthe job had not ended after {timeout} s")
    return Finished(job.returncode, output)


def _end(job: subprocess.Popen[str]) -> None:
    """Ends the launcher; it is given time to end its ranks, which lead sessions of their own."""
    job.terminate()
    try:
        job.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)


@functools.cache
def outcomes(framework: str, backend: str, size: int, wanted: tuple[str, ...], **variables: str,
             ) -> dict[str, str | None]:
    """What became of the scenarios of a framework that are wanted, in one job: None, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        job = horovodrun(backend, size, "-m", "tests.worker", framework, str(report), *wanted, timeout=540,
                         extra=variables)
        found: dict[str, str | None] = json.loads(report.read_text()) if report.exists() else {}
    for name in wanted:
        found.setdefault(name, f"did not run; the job ended with status {job.returncode}:\n{job.output[-6000:]}")
    return found

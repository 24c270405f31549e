"""Starts real jobs, of Horovod and of torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
START = ("env", "--default-signal=INT", "sh", "-c", 'LAUNCHER=$$ exec "$@"', "sh")
"""Before the launcher: its ranks know its process, and Ctrl-C ends it also where tests run in the background."""
WHOSE = re.compile(r"\[1,\d+\]<std(?:out|err)>:")
"""Mark that mpirun puts before each piece of a rank's output, in the middle of a line too."""


@dataclass(frozen=True)
class Finished:
    """A job that has ended; output: stdout and stderr of all ranks together; returncode: -1 if it had to be ended."""

    returncode: int
    output: str


def environment() -> dict[str, str]:
    """Return the environment of a job whose ranks outnumber the cores, as root or not."""
    changes = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
               "OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
               "TF_CPP_MIN_LOG_LEVEL": "3"}
    if os.geteuid() == 0:
        changes |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **changes}


def horovodrun(backend: str, size: int, *command: str, timeout: float = 240, flags: tuple[str, ...] = (),
               extra: Mapping[str, str] | None = None) -> Finished:
    """Run `python command...` on `size` ranks of this machine; backend: "mpi" or "gloo"."""
    hosts = () if flags else ("-H", f"localhost:{size}")
    line = [*START, sys.executable, "-m", "tests.horovodrun", "-np", str(size), *hosts, f"--{backend}", *flags,
            sys.executable, *command]
    return run(line, timeout, extra)


def torchrun(size: int, *command: str, timeout: float = 240, flags: tuple[str, ...] = (),
             extra: Mapping[str, str] | None = None) -> Finished:
    """Run `python command...` on `size` ranks of this machine."""
    line = [*START, sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size),
            *flags, *command]
    return run(line, timeout, extra)


def run(line: Sequence[str], timeout: float, extra: Mapping[str, str] | None) -> Finished:
    """Run a launcher; end it and its ranks after this many seconds."""
    with subprocess.Popen(line, env={**environment(), **(extra or {})}, cwd=ROOT, text=True, start_new_session=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        try:
            output, _ = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _end(job)
            output, _ = job.communicate()
            return Finished(-1, WHOSE.sub("", f"{output}\nthe job had not ended after {timeout} s"))
        except BaseException:  # Ctrl-C, or the limit of a test
            _end(job)
            raise
    return Finished(job.returncode, WHOSE.sub("", output))


def _end(job: subprocess.Popen[str]) -> None:
    """End the launcher: give it time to end its ranks, which lead sessions of their own, then kill it."""
    ranks = psutil.Process(job.pid).children(recursive=True)
    job.terminate()
    _, left = psutil.wait_procs([psutil.Process(job.pid), *ranks], timeout=20)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

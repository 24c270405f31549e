"""Starts the ranks of a benchmark, and reads what they measured.

What each rank runs is a module of its own that ends in `run_rank(measure)`. `measured` starts it: every rank calls
`measure(**settings)`, and what rank 0 returns comes back. Settings and results travel as JSON in a folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
MPIRUN = str(BIN / "mpirun")
SETTINGS, RESULTS = "settings.json", "results.json"


def environment() -> dict[str, str]:
    """Return this environment, with the launchers on PATH, for more ranks than cores, as root or not."""
    variables = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}", "OMP_NUM_THREADS": "1",
                 "OMPI_MCA_mpi_yield_when_idle": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
                 "HOROVOD_GLOO_TIMEOUT_SECONDS": "300"}
    if os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables


def horovodrun(ranks: int, backend: str = "mpi") -> list[str]:
    """Return the command line of Horovod's launcher for ranks of this machine. backend: "mpi" or "gloo"."""
    return [str(BIN / "horovodrun"), "-np", str(ranks), "-H", f"localhost:{ranks}", f"--{backend}"]


def torchrun(ranks: int) -> list[str]:
    """Return the command line of torchrun for ranks of this machine."""
    return [str(BIN / "torchrun"), "--standalone", "--no-python", "--nproc-per-node", str(ranks)]


def rank() -> int:
    """Return this process's rank, as its launcher has told it; 0 if there is none."""
    names = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


def run(command: Sequence[str], timeout: float) -> None:
    """Run the command to its end. Raise SystemExit if it fails, or takes more than `timeout` seconds."""
    line = " ".join(command)
    # A session of its own, so that whatever ends this program ends the ranks.
    with subprocess.Popen(command, env=environment(), cwd=ROOT, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as job:
        try:
            output, _ = job.communicate(timeout=timeout)
        except BaseException as error:
            os.killpg(job.pid, signal.SIGTERM)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise SystemExit(f"benchmark: a job had not ended after {timeout:g} s: {line}") from None
    if job.returncode:
        raise SystemExit(f"benchmark: a job failed ({job.returncode}): {line}\n{output[-4000:]}")


def measured(launcher: Sequence[str], module: str, settings: dict[str, Any], timeout: float) -> Any:
    """Return what rank 0 of the module measured with these settings."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, SETTINGS).write_text(json.dumps(settings))
        run([*launcher, sys.executable, "-m", module, folder], timeout)
        return json.loads(Path(folder, RESULTS).read_text())


def run_rank(measure: Callable[..., Any]) -> None:
    """Run one rank's part of `measured`."""
    folder = Path(sys.argv[1])
    results = measure(**json.loads((folder / SETTINGS).read_text()))
    if rank() == 0:
        (folder / RESULTS).write_text(json.dumps(results))


def end_cleanly_on_sigterm() -> None:
    """Have SIGTERM end the program in order; otherwise ranks and hosts would be left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("benchmark: terminated"))

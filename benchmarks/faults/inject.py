"""Does to this rank what its plan says."""

from __future__ import annotations

import importlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.faults.plans import PAUSE, STEPS, Plan

TIME = "fault.time"
"""The file whose time of writing is that of the fault."""


class Injector:
    """Fault of one rank. folder: where the time of the fault is written down."""

    def __init__(self, plan: Plan, rank: int, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._is_faulty = rank == plan.rank
        self._timer: threading.Timer | None = None

    def density(self, usual: float) -> float:
        """Return the density of this rank."""
        return 2 * usual if self._is_faulty and self._plan.fault == "options" else usual

    @property
    def steps(self) -> int:
        """Steps of each of this rank's epochs."""
        return STEPS - 2 if self._is_faulty and self._plan.fault == "fewer" else STEPS

    @property
    def nan_step(self) -> int | None:
        """The step of every epoch whose data are NaN."""
        return self._plan.step % STEPS if self._is_faulty and self._plan.fault == "nan" else None

    def before_step(self, step: int) -> None:
        """Start the fault if this is its step. step: counted from 0 over all epochs."""
        if not self._is_faulty or step != self._plan.step:
            return
        fault = self._plan.fault
        if fault in ("kill", "pause", "freeze"):
            self._timer = threading.Timer(self._plan.delay, self._signal, [fault])
            self._timer.start()
        elif fault in ("vanish", "raise", "exit", "destroy"):
            self._note()
            if fault == "destroy":
                dist = importlib.import_module("torch.distributed")
                dist.destroy_process_group()
                return
            if fault == "vanish":
                os._exit(3)
            if fault == "exit":
                sys.exit(3)
            raise ValueError("the file is gone")

    def finish(self) -> None:
        """Wait until a fault of the last step has come."""
        if self._timer is not None:
            self._timer.join()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let no file grow beyond what the disk takes, inside the block."""
        if not (self._is_faulty and self._plan.fault == "disk"):
            yield
            return
        self._note()
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an OSError instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._plan.room, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            signal.signal(signal.SIGXFSZ, before)

    def _signal(self, fault: str) -> None:
        self._note()
        if fault == "pause":
            subprocess.Popen(["sh", "-c", f"sleep {PAUSE}; kill -CONT {os.getpid()}"], start_new_session=True)
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

    def _note(self) -> None:
        (self._folder / TIME).touch()

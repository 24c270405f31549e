"""The steps of an elastic job, in any framework: at step 5 the worker of one host kills itself; the rest go on."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 12
VICTIM = "127.0.0.1"
"""The host with one worker: Horovod lets no host of a dead worker take part again."""
FOLDER = Path(sys.argv[1])


def take_steps(hvd: Any, state: Any, take_step: Callable[[int], None], residual: Callable[[], list[float]]) -> None:
    """Take and commit steps until the last; wait for the newcomer once a worker was killed."""
    killed = FOLDER / "killed"
    while state.step < STEPS:
        if state.step == 5 and os.environ["HOROVOD_HOSTNAME"] == VICTIM and not killed.exists():
            killed.write_text(json.dumps(residual()))
            os.kill(os.getpid(), signal.SIGKILL)
        if killed.exists() and hvd.size() < 3:
            time.sleep(0.1)
        else:
            take_step(state.step)
            state.step += 1
        state.commit()


def report(hvd: Any, step: int, residual: list[float], weight: Any, gradient: Callable[[int, int], Any]) -> None:
    """Write what all ranks have, for the test. gradient: returns that of a step and a rank."""
    computed = sum(gradient(step, rank).ravel() for step in range(STEPS) for rank in range(3))
    everyone = hvd.allgather_object({"size": hvd.size(), "step": step, "residual": residual,
                                     "weight": weight.tolist(), "computed": computed.tolist()})
    if hvd.rank() == 0:
        (FOLDER / "outcome.json").write_text(json.dumps(everyone))

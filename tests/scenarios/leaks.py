"""Leaks: objects and threads that are left of models that are dropped, and memory that every step leaves."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

ONCE = 2
"""Objects of a kind that may stay, as they are there once in a process; of each model's there would be more."""
COMMUNICATORS = ("MPITransport", "Gate", "Control", "Watched", "HorovodRanks")
"""One for each reduction that has a communicator of its own, which lasts until the job ends."""
OF_GRAPHS = ("Form",)
"""Objects that stay with a function's graph in TensorFlow; they hold neither models nor gradients."""
OF_FRAMEWORKS = {"Parameter": "torch", "ResourceVariable": "tensorflow", "LossScaleOptimizer": "keras",
                 "LossScaleOptimizerV3": "tf_keras"}
FEW, MANY = 200, 2000
"""Steps before memory is looked at first, and in all."""
GROWTH = 1000
"""Blocks of memory that may come and go; a single object that each step leaves makes more."""
PATIENCE = 20
"""Seconds for what ends on all ranks together: far more than it takes."""


def census() -> Counter[str]:
    """Count our living objects, variables and parameters, and our running threads."""
    counted = Counter(name for each in gc.get_objects() if (name := _name(type(each))) is not None)
    counted["threads"] = sum(thread.name.startswith("horovod_oktopk") for thread in threading.enumerate())
    return counted


def assert_nothing_stays(hvd: Any, train: Callable[[], Any], several: int = 5) -> None:
    """Make, train and drop more than ONCE models on all ranks; assert that nothing of them stays."""
    assert several > ONCE
    # Rounds of scenarios before; those that have failed leave an object for good, but no thread.
    train()  # makes what is there once in a process, if no scenario has before
    _settled(lambda _: all(thread.name != "horovod_oktopk.partial" for thread in threading.enumerate()))
    gc.freeze()  # what was there before is not looked at, which takes most of the time otherwise
    try:
        for _ in range(several):
            train()
        hvd.allgather_object("all have dropped theirs")
        left = _settled(lambda now: max(now.values(), default=0) <= ONCE)
    finally:
        gc.unfreeze()
    assert max(left.values(), default=0) <= ONCE, f"{several} models that were dropped have left {dict(left)}"


def assert_memory_stays(hvd: Any, step: Callable[[int], Any]) -> None:
    """Take steps, numbered, on all ranks; assert that the memory of Python's objects does not grow."""
    held = []
    for number in range(1, MANY + 1):
        step(number)
        if number in (FEW, MANY):
            hvd.allgather_object("all have taken theirs")
            gc.collect()
            held.append(sys.getallocatedblocks())
            hvd.allgather_object("all have looked")
    assert held[1] - held[0] < GROWTH, f"after {FEW} and {MANY} steps there were these blocks of memory: {held}"


def _settled(is_done: Callable[[Counter[str]], bool]) -> Counter[str]:
    """Return the census once it is as it should be, or when nothing more can be hoped for."""
    until = time.monotonic() + PATIENCE
    while True:
        gc.collect()
        now = census()
        if is_done(now) or time.monotonic() > until:
            return now
        time.sleep(0.1)


def _name(kind: type) -> str | None:
    module, name = str(kind.__module__), kind.__qualname__
    if module.startswith("horovod_oktopk"):
        return None if name in (*COMMUNICATORS, *OF_GRAPHS) else name
    return name if module.startswith(OF_FRAMEWORKS.get(name, "none of these")) else None

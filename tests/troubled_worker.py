"""A rank of a test job (see worker.py) in which TROUBLE of its environment happens: in a scenario, or at the end."""

from __future__ import annotations

import atexit
import os
import time

import horovod.torch as hvd

from tests import worker

TROUBLE = os.environ["TROUBLE"]


def first() -> None:
    if TROUBLE == "crash":
        os._exit(3)
    if TROUBLE == "failure":
        assert hvd.rank() == 0, "rank 1 has no such thing"
        hvd.allgather_object(None, name="for which rank 1 never comes")
    if TROUBLE == "hang" and hvd.rank() == 1:
        time.sleep(600)


def second() -> None:
    pass


if __name__ == "__main__":
    worker.all_scenarios = lambda _framework: {"first": first, "second": second}
    worker.main()
    if TROUBLE == "crash at the end":
        atexit.register(os._exit, 3)  # what is registered last is called first
    elif TROUBLE == "hang at the end":
        atexit.register(time.sleep, 600)

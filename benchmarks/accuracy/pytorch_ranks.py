"""Ranks of a training: in a job, as users have them, or as threads of one process."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.accuracy.pytorch_training import Ranks, Setup, train
from benchmarks.accuracy.thread_ranks import ThreadJob
from benchmarks.accuracy.training import Results, finish
from horovod_oktopk.transport.base import Transport
from tests.support.threads import run_ranks

Make = Callable[[Ranks, argparse.Namespace], Setup]
LONGEST_STEP = 600.0
"""Seconds for which threads wait for each other."""


def run(make: Make, shown: str, parser: argparse.ArgumentParser,
        line: list[str] | None) -> None:
    """Run a whole program. make: one rank's setup; the model is the same on all ranks, as the seed is.

    shown: what was reached, with the metric to be filled in.
    """
    arguments = parser.parse_args(line)
    if arguments.clip and not (arguments.threads and arguments.compression in ("none", "oktopk", "sameblocks")):
        parser.error("--clip works on ranks that are threads, with oktopk, sameblocks or none: give --threads")
    if arguments.threads:
        results = train_on_threads(make, arguments)
    else:
        ranks = ranks_of_job()
        results = _train(ranks, make, arguments)
    if arguments.threads or ranks.rank() == 0:
        finish(results, shown.format(**results), arguments.json)


def ranks_of_job() -> Any:
    """Start, and return the ranks, of whatever has launched this process."""
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "horovod"
    return importlib.import_module(f"benchmarks.accuracy.{name}_ranks").start()


def train_on_threads(make: Make, arguments: argparse.Namespace) -> Results:
    """Return the results of a training whose ranks are threads of this process."""
    def program(transport: Transport) -> Results:
        return _train(ThreadJob(transport), make, arguments)

    return run_ranks(arguments.threads, program, LONGEST_STEP)[0]


def _train(ranks: Ranks, make: Make, arguments: argparse.Namespace) -> Results:
    torch.set_num_threads(1)
    with ranks.own_randomness():
        torch.manual_seed(arguments.seed)
        setup = make(ranks, arguments)
        torch.manual_seed(arguments.seed * ranks.size() + ranks.rank())  # every rank has dropout masks of its own
    return train(setup, ranks, arguments)

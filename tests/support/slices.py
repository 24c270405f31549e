"""Runs a scheme where each host is one worker, on ranks that are threads and hold slices of their host's elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from horovod_oktopk.hosts.algorithm import OnHosts
from horovod_oktopk.hosts.hosts import hosts_of
from horovod_oktopk.phases.agreement import Attendance
from horovod_oktopk.schemes.algorithm import Algorithm, Memory
from horovod_oktopk.schemes.step import reduce
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.transport.connect import Connection
from horovod_oktopk.transport.counting import CountingTransport
from tests.support.threads import run_ranks


def on_slices(gradients: np.ndarray, k: int, ranks_per_host: int, make: Callable[[], Algorithm],
              change: Callable[[int, Memory], Memory] = lambda _, memory: memory) -> list[list[Any]]:
    """Take steps with the hosts' gradients, shape (steps, H, n).

    `change` gets a host's number and a rank's memory before each step, and returns the memory to go on with.
    Return by step and rank the update; of the rank's slice acc, residual and a mask of what was sent; and the report.
    """
    _, size, n = gradients.shape
    bounds = (n * np.arange(ranks_per_host + 1) // ranks_per_host).tolist()

    def program(transport):
        host, local = divmod(transport.rank, ranks_per_host)
        counting, algorithm, memory = CountingTransport(transport), make(), Memory()
        grid = np.arange(transport.size).reshape(size, ranks_per_host) if ranks_per_host > 1 else None
        hosts = hosts_of(Connection(counting, lambda members: transport.group(members.tolist(), "group"), grid))
        algorithm = algorithm if hosts is None else OnHosts(algorithm, hosts)
        mine = slice(bounds[local], bounds[local + 1])
        accumulator, found = NumpyAccumulator(bounds[local + 1] - bounds[local], gradients.dtype), []
        for step in gradients:
            counting.reset()
            acc = accumulator.residual + step[host, mine]
            finite = accumulator.accumulate([(0, step[host, mine].copy())])
            outcome = reduce(algorithm, accumulator, Attendance("", k, finite=finite),
                             change(host, memory), counting, n)
            memory, result = outcome.memory, outcome.result
            accumulator.commit(result.contributed, result.remainder)
            sent = np.zeros(len(acc), np.bool_)
            sent[result.contributed] = True
            found.append((result.update, acc, accumulator.residual.copy(), sent, outcome.report))
        return found

    by_rank = run_ranks(size * ranks_per_host, program)
    return [list(step) for step in zip(*by_rank, strict=True)]


def by_host(parts: Sequence[np.ndarray], ranks_per_host: int) -> np.ndarray:
    """Return the vectors of the hosts, shape (H, n), from the slices of their ranks."""
    return np.stack([np.concatenate(parts[first:first + ranks_per_host])
                     for first in range(0, len(parts), ranks_per_host)])

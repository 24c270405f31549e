"""Monitoring: the log, and the profiler."""

from __future__ import annotations

import logging

from horovod_oktopk import OkTopk
from horovod_oktopk.kernels import KERNELS
from tests.scenarios.common import SHAPES, N, gradients, logged
from tests.scenarios.driver import Kind


def check_one_line_of_the_log_says_what_is_reduced_and_over_what(kind: Kind) -> None:
    hvd = kind.hvd
    with logged(logging.INFO) as messages:
        trainer = kind(OkTopk(density=7 / N))
        for step in range(3):
            trainer.step(gradients(step, hvd.rank()))
    found = [message for message in messages if message.startswith("OkTopk: ")]
    if hvd.size() == 1:
        route = "1 rank"
    elif hvd.mpi_enabled():
        route = f"{hvd.size()} ranks over MPI"
    else:
        route = f"{hvd.size()} ranks over {kind.route}"
    line = f"OkTopk: n = {N} in {len(SHAPES)} tensors, k = 7; {route}"
    assert len(found) == (hvd.rank() == 0), messages
    assert all(message.startswith(line) and message.endswith(f"; kernels in {KERNELS.name}") for message in found)

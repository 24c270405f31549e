"""The dense side in host memory: residual + gradient, undone by not committing, without temporaries of n."""

from __future__ import annotations

import functools
import tracemalloc

import numpy as np
import pytest

from horovod_oktopk import OkTopk
from horovod_oktopk.kernels import NATIVE, NumpyKernels
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.transport.counting import CountingTransport
from tests.support.simulation import Rank
from tests.support.threads import ThreadTransport, ThreadWorld

from .accumulators import PROGRAMS, normal


@pytest.mark.parametrize("kernels", [NumpyKernels(), NATIVE], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("program", PROGRAMS)
def test_conformance(program, kernels):
    with np.errstate(all="ignore"):
        PROGRAMS[program](functools.partial(NumpyAccumulator, kernels=kernels), lambda gradient: gradient)


def peaks(n, k, steps):
    """Return the largest number of bytes allocated at once, in each step of one rank."""
    rank = Rank(OkTopk().algorithm(), NumpyAccumulator(n))
    transport = CountingTransport(ThreadTransport(ThreadWorld(1), 0))
    found = []
    for step in range(steps):
        gradient = normal(n, step)
        tracemalloc.start()
        rank.reduce(gradient, k, transport)
        found.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return found


@pytest.mark.parametrize("density", [0.01, 0.001])
def test_no_step_allocates_anything_of_size_n(density):
    n = 2_000_000
    assert max(peaks(n, round(density * n), 3)) < 1.25 * n  # bytes; n elements have 4 n

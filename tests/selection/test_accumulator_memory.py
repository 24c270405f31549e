"""Memory of a step's temporaries, and where it comes from."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from horovod_oktopk import OkTopk
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.transport.counting import CountingTransport
from tests.support.simulation import Rank
from tests.support.threads import ThreadTransport, ThreadWorld

n, options = 3_000_000, OkTopk(density=0.05)
rank = Rank(options.algorithm(), NumpyAccumulator(n))
transport = CountingTransport(ThreadTransport(ThreadWorld(1), 0))
gradient = np.random.default_rng(0).standard_normal(n, np.float32)
for step in range(12):
    if step == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    rank.reduce(gradient, options.k_of(n), transport)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_steps_use_the_pages_of_those_before() -> None:
    """A step's temporaries are some 1,500 pages; a few are new, where a step needs more than any before."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 1000

"""Partial rounds of a model's gradients among threads: nothing is lost, whoever has come."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from horovod_oktopk import OkTopk, Partial
from horovod_oktopk.modes.partial.mode import PartialMode
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.transport.base import Transport
from horovod_oktopk.vectors.layout import Layout
from tests.support.flat_gradients import FlatGradients
from tests.support.ranks import ThreadRanks
from tests.support.threads import run_ranks

N = 200


def made(transport: Transport, options: Partial, dtype: str = "float32") -> PartialMode:
    layout = Layout([("weights", (N,), dtype)])
    return PartialMode(options, False, layout, lambda: NumpyAccumulator(N),
                          ThreadRanks(transport))


def applied(reducer: PartialMode, count: int) -> np.ndarray:
    """Return the sum of `count` updates."""
    total = np.zeros(N, np.float32)
    for _ in range(count):
        gradients = FlatGradients(total)
        reducer.prepare(gradients)
        total += gradients.dense_update()
    return total


def synchronized(reducer: PartialMode) -> np.ndarray:
    return sum(applied(reducer, count) for count in reducer.synchronize(for_good=True))


@pytest.mark.parametrize("value_dtype", [None, "bfloat16", "log4"])
def test_what_rounding_leaves_over_is_kept_by_a_rank_that_does_not_come(value_dtype):
    """It owns a region, and rounds the others' sums; draws are such that these two start all rounds."""
    def drawn(seed: int, number: int) -> int:
        return int(np.random.default_rng((seed, number)).integers(3))

    seed = next(seed for seed in range(10_000) if all(drawn(seed, number) < 2 for number in range(1, 7)))
    options = Partial(OkTopk(density=0.5, value_dtype=value_dtype), policy="majority", seed=seed)

    def program(transport):
        reducer, random = made(transport, options), np.random.default_rng(transport.rank)
        computed, seen = np.zeros(N, np.float32), np.zeros(N, np.float32)
        reducer.start()
        for _ in range(5 if transport.rank < 2 else 0):
            gradient = random.integers(-9999, 9999, N).astype(np.float32)
            computed += gradient
            seen += applied(reducer, reducer.begin(FlatGradients(gradient)))
        seen += synchronized(reducer)
        residual, record = reducer.read_residual(), reducer.records()[0]["residual"]
        reducer.close()
        return computed, seen, residual, record

    everyone = run_ranks(3, program)
    assert all(np.array_equal(seen, everyone[0][1]) for _, seen, _, _ in everyone)
    computed, kept = (sum(rank[place] for rank in everyone) for place in (0, 2))
    assert np.array_equal(everyone[0][1] + kept, computed)
    assert all(np.array_equal(residual, record) for _, _, residual, record in everyone)


def test_gradients_that_cannot_be_read_leave_what_was_handed_in():
    """Rank 1 came too late with its first gradients: they are pending when the next ones fail half-way."""
    begun, done = threading.Event(), threading.Event()

    def broken():
        yield 0, np.full(N // 2, 7, np.float32)
        raise OSError("the rest is gone")

    def program(transport):
        reducer = made(transport, Partial(OkTopk(density=0.1), policy="solo"))
        reducer.start()
        if transport.rank == 1:
            assert begun.wait(20)
        seen = applied(reducer, reducer.begin(FlatGradients(np.arange(N, dtype=np.float32))))
        begun.set()
        if transport.rank == 1:
            with pytest.raises(OSError, match="the rest is gone"):
                reducer.begin(FlatGradients(seen, broken()))
            done.set()
        assert done.wait(20)
        seen += synchronized(reducer)
        kept = reducer.read_residual()
        reducer.close()
        return seen, kept

    (seen, first), (_, second) = run_ranks(2, program)
    assert np.array_equal(seen + first + second, 2 * np.arange(N))


def test_a_sum_that_overflows_is_dropped_and_the_next_rounds_count(caplog):
    """Each rank's gradient can be held in float16, and their sum cannot; both are pending when the round begins."""
    options, both = Partial(OkTopk(density=0.1, global_density=1.0), policy="majority"), threading.Barrier(2)

    def program(transport):
        reducer = made(transport, options, "float16")
        reducer.start()
        gradient = np.ones(N, np.float16)
        gradient[7] = 40_000
        reducer._pending.hand_in(FlatGradients(gradient).pieces())
        both.wait(20)
        for _ in range(4):
            for _ in range(reducer.begin(FlatGradients(np.ones(N, np.float16)))):
                reducer.prepare(FlatGradients(gradient))
        for _ in reducer.synchronize(for_good=True):
            pass
        finite, kept = reducer.report.finite, reducer.read_residual()
        reducer.close()
        return finite, float(np.abs(kept).max())

    for finite, largest in run_ranks(2, program):
        assert finite
        assert largest < 100
    assert "some rank's gradient was not finite, or the ranks' sum" in caplog.text

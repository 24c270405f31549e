"""Step-ahead error feedback on ranks that are threads: what needs no framework."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from horovod_oktopk import NonFiniteError, OkTopk, OptionError, PluginError, SameBlocks, StepAhead
from horovod_oktopk.modes.step_ahead.mode import StepAheadMode
from horovod_oktopk.schemes.options import OVERSHOOT
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator
from horovod_oktopk.selection.replica import Replica
from horovod_oktopk.transport import ending
from horovod_oktopk.vectors.layout import Layout
from horovod_oktopk.vectors.wire import BLOCK
from tests.support.flat_gradients import FlatGradients
from tests.support.ranks import ElasticRanks, ThreadRanks
from tests.support.simulation import same_bits
from tests.support.threads import run_ranks

ENTRIES = [("a", (50, 4), "float32"), ("b", (3,), "float32"), ("c", (97,), "float32")]
N = 300
OPTIONS = StepAhead(OkTopk(density=0.05, threshold_interval=4, region_interval=5))


class NoGradients(FlatGradients):
    """Zeros, of any length: these tests move the parameters themselves."""

    def elements(self, places: np.ndarray) -> np.ndarray:
        return np.zeros(len(places))


ZEROS = NoGradients(np.zeros(1, np.float32))


class Worker:
    """One rank with a model of three arrays; `step` moves them by what it is given."""

    def __init__(self, transport: Any, options: StepAhead = OPTIONS, average: bool = True, entries: Any = ENTRIES,
                 **arguments: Any) -> None:
        self.ranks = ElasticRanks(transport)
        layout = Layout(entries)
        random = np.random.default_rng(7)
        self.parameters = [random.standard_normal(int(np.prod(shape))).astype(dtype) for _, shape, dtype in entries]
        self.accumulator = NumpyParameterAccumulator(layout.n, layout.dtype)
        self.reducer = StepAheadMode(options, average, layout, self.accumulator,
                                        Replica(layout, lambda: self.parameters), self.ranks, **arguments)
        self.moved = np.zeros(layout.n, np.float64)

    @property
    def p(self) -> np.ndarray:
        return np.concatenate(self.parameters)

    @property
    def w(self) -> np.ndarray:
        return self.accumulator.shared

    def step(self, move: np.ndarray) -> None:
        """Move p by -λ · move."""
        self.reducer.begin(ZEROS)
        before = self.p.astype(np.float64)
        for offset, own in zip(self.reducer.reduction.layout.offsets, self.parameters, strict=False):
            own -= (self.reducer.coefficient * move[offset:offset + len(own)]).astype(own.dtype)
        self.moved += self.p - before
        self.reducer.end()

    def take(self, several: np.ndarray) -> None:
        for move in several:
            self.step(move)


def moves(rank: int, steps: int, scale: float = 0.1, n: int = N) -> np.ndarray:
    return (scale * np.random.default_rng(rank).standard_normal((steps, n)) ** 3).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "global_density"), [(2, "auto"), (3, 0.04)])
def test_thousands_of_steps_of_very_different_magnitude_do_not_drift(size, global_density):
    steps, scales = 2000, np.float32(10.0) ** np.linspace(-4, 2, N, dtype=np.float32)

    def program(transport):
        worker, seen = Worker(transport, StepAhead(OkTopk(density=0.02, global_density=global_density))), []
        for move in moves(transport.rank, steps, 1e-3):
            worker.step(move * scales)
            seen.append(hash(worker.w.tobytes()))
        worker.reducer.catch_up()
        return worker, seen

    workers, seen = zip(*run_ranks(size, program), strict=True)
    assert all(each == seen[0] for each in seen), "the same bits on all ranks, after every step"
    assert len(set(seen[0])) == steps, "every step moves them, but the first, which applies nothing"
    weight = size * workers[0].reducer.coefficient
    start = Worker(None).p.astype(np.float64)
    error = weight * (workers[0].w - start) - sum(w.moved - (w.p.astype(np.float64) - w.w) for w in workers)
    # An element is applied at most `steps` times, each with three roundings to half a unit in the last place.
    largest = np.maximum(np.abs(start), sum(np.abs(w.moved) for w in workers)) + 1
    assert (np.abs(error) <= weight * np.sqrt(steps) * 8 * np.finfo(np.float32).eps * largest).all()


# The beginning.

@pytest.mark.parametrize(("options", "message"), [
    ({"ahead": 0}, r"ahead must be in \(0, 1\]"), ({"ahead": 1.5}, r"ahead must be in \(0, 1\]"),
    ({"local_steps": 0}, "local_steps must be an integer of at least 1"), ({"overlap": 1}, "True or False"),
    ({"inner": "solo"}, "StepAhead takes Dense"),
    *(({"gain": gain}, 'gain must be .*above 0, None or "auto"')
      for gain in (0, -1.0, "yes", True, float("nan"), np.float32("inf")))])
def test_options_that_are_not_allowed_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        StepAhead(**options)


@pytest.mark.parametrize(("dtype", "message"), [
    *((half, f"'b' has {half}") for half in ("float16", "bfloat16")),
    ("float64", "one dtype; 'b' has float64, and '.*' has float32: .*make two optimizers")])
def test_parameters_in_16_bits_or_of_several_dtypes_are_refused_by_name(dtype, message):
    layout = Layout([ENTRIES[0], ("b", (3,), dtype), ENTRIES[2]])
    with pytest.raises(PluginError, match=message):
        StepAheadMode(OPTIONS, True, layout, NumpyParameterAccumulator(layout.n), Replica(layout, list),
                         ThreadRanks(None))


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("ahead", [1.0, 0.5])
@pytest.mark.parametrize(("density", "overshoot", "length"), [(0.25, OVERSHOOT, BLOCK), (1.0, 0.0, N)])
def test_same_blocks_move_p_past_w_by_what_a_rank_differs_from_the_mean(average, ahead, density, overshoot, length):
    def program(transport):
        worker = Worker(transport, StepAhead(SameBlocks(density=density), ahead=ahead, overlap=False), average)
        worker.step(np.full(N, 2.0 ** transport.rank, np.float32))  # no rounding changes these, nor their sum
        return worker.p - worker.w

    mine = ahead * 2.0 ** np.arange(3)
    for differs, past_w in zip(mine - mine.mean(), run_ranks(3, program), strict=True):
        np.testing.assert_allclose(past_w[:length], overshoot * differs, atol=1e-5)


@pytest.mark.parametrize(("size", "overshoot"), [(8, 0.0), (9, OVERSHOOT)])
@pytest.mark.parametrize("ahead", [1.0, 0.5])
def test_oktopk_moves_p_past_w_among_many_ranks(size, overshoot, ahead):
    def program(transport):
        worker = Worker(transport, StepAhead(OkTopk(density=2 / N, value_dtype=None), ahead=ahead, overlap=False))
        own = np.zeros(N, np.float32)
        own[[3, 4 + transport.rank % 2]] = 2.0 ** transport.rank, 1.0
        worker.step(own)
        return worker.p - worker.w

    mine = ahead * 2.0 ** np.arange(size)
    of_some = ahead * (1 - np.arange(size) % 2)  # whose ranks have selected the second element, and the others not
    for past_w, *differ in zip(run_ranks(size, program), mine - mine.mean(), of_some - of_some.mean(), strict=True):
        np.testing.assert_allclose(past_w[[3, 4]], overshoot * np.array(differ), atol=1e-5)


def test_p_returns_to_w_where_everything_is_sent_also_if_some_sums_are_zero():
    def program(transport):
        worker = Worker(transport, StepAhead(OkTopk(density=1.0, value_dtype=None), ahead=1.0, overlap=False))
        worker.step(np.where(np.arange(N) < N // 2, np.float32(transport.rank), np.float32(0)))
        return worker.p - worker.w

    for past_w in run_ranks(9, program):
        np.testing.assert_allclose(past_w, 0, atol=1e-5)


# What is not finite.

@pytest.mark.parametrize("value_dtype", [None, "log4"])
def test_a_sum_that_overflows_leaves_the_shared_parameters(value_dtype):
    def program(transport):
        worker = Worker(transport, StepAhead(OkTopk(density=0.05, value_dtype=value_dtype), ahead=1.0))
        with pytest.raises(NonFiniteError, match="their sum is not"):  # noqa: PT012 - in the next step
            worker.step(np.full(N, 3e38, np.float32))
            worker.reducer.begin(ZEROS)
        return bool(np.isfinite(worker.w).all())

    assert run_ranks(2, program) == [True] * 2


# What all ranks share, to be read.

def test_inside_shared_the_model_holds_what_all_ranks_share_also_where_an_error_ends_it():
    def program(transport):
        worker = Worker(transport)
        worker.take(moves(transport.rank, 3))
        worker.reducer.catch_up()
        own, shared = worker.p, worker.w.copy()
        assert not same_bits(own, shared)
        with pytest.raises(KeyError), worker.reducer.shared():  # noqa: PT012 - what is inside is seen
            assert same_bits(worker.p, shared)
            with worker.reducer.shared():
                assert same_bits(worker.p, shared)
            with pytest.raises(PluginError, match="inside shared_parameters"):
                worker.reducer.begin(ZEROS)
            raise KeyError
        return same_bits(worker.p, own) and same_bits(worker.w, shared)

    assert run_ranks(2, program) == [True, True]


@pytest.mark.parametrize("diverged", [False, True])
def test_p_moves_along_with_what_the_program_changes_inside_shared(diverged):
    """The change stays, whatever is exchanged then. What a rank has not sent stays, too, if it can be sent."""
    def program(transport):
        worker = Worker(transport)
        worker.take(moves(transport.rank, 5))
        worker.reducer.catch_up()
        if diverged:
            worker.parameters[0][:] = np.nan
        unsent = np.nan_to_num(worker.w - worker.p)
        with worker.reducer.shared():
            for own in worker.parameters:
                own[:] = 7
        assert np.allclose(worker.w - worker.p, unsent, atol=1e-6)
        worker.take(np.zeros((60, N)))
        worker.reducer.catch_up()
        return unsent / worker.reducer.coefficient, worker.w

    everyone = run_ranks(2, program)
    sent = np.mean([unsent for unsent, _ in everyone], axis=0)
    assert all(np.allclose(w, 7 - sent, atol=1e-3) for _, w in everyone)
    assert same_bits(everyone[0][1], everyone[1][1])


@pytest.mark.parametrize("ends", ["saved", "suspended"])
def test_what_is_saved_or_suspended_after_a_change_has_what_was_not_sent(ends):
    def program(transport):
        worker = Worker(transport)
        worker.take(moves(transport.rank, 5))
        worker.reducer.catch_up()
        unsent = worker.w - worker.p
        with worker.reducer.shared():
            for own in worker.parameters:
                own[:] = 7
            [record] = worker.reducer.records()
            if ends == "suspended":
                worker.reducer.suspend()
        assert np.allclose(record["residual"], unsent, atol=1e-6)
        worker.reducer.begin(ZEROS)
        return np.allclose(worker.w - worker.p, unsent, atol=1e-6) and (worker.w == 7).all()

    assert run_ranks(2, program) == [True, True]


def test_what_is_suspended_inside_shared_stays_so_until_its_next_step():
    def program(transport):
        worker = Worker(transport)
        mine = moves(transport.rank, 8)
        worker.take(mine[:4])
        with worker.reducer.shared():
            shared = worker.p
            worker.reducer.suspend()
        assert same_bits(worker.p, shared)
        worker.reducer.begin(ZEROS)
        assert same_bits(worker.w, shared)
        return same_bits(worker.p, shared)

    assert run_ranks(2, program) == [False, False], "what was not sent is there again"


@pytest.mark.parametrize(("steps", "enters", "told"), [(2, True, False), (2, False, True), (1, False, False)])
def test_a_program_that_never_looked_at_what_is_shared_is_told_at_its_end(steps, enters, told, caplog):
    """But for one that ends in the first exchange: it has failed, and has been told why."""
    def program(transport):
        worker = Worker(transport)
        for step in range(steps):
            worker.step(moves(step, 1)[0])
        if enters:
            with worker.reducer.shared():
                pass
        worker.reducer.close()

    run_ranks(2, program)
    assert [record.message[:30] for record in caplog.records] == ["shared_parameters was never en"] * told


@pytest.mark.parametrize("ends", [lambda patch: patch.setattr(sys, "last_value", ValueError(), raising=False),
                                  lambda patch: patch.setattr(ending, "_exit_status", 3)], ids=["raising", "exiting"])
def test_a_program_that_has_failed_is_not_told_that_it_never_looked(ends, caplog, monkeypatch):
    """Python keeps the exception that ends a program in `sys.last_value`."""
    def program(transport):
        worker = Worker(transport)
        for step in range(2):
            worker.step(moves(step, 1)[0])
        worker.reducer.close()

    ends(monkeypatch)
    run_ranks(2, program)
    assert not caplog.records

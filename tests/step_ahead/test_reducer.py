"""Step-ahead error feedback on ranks that are threads: what needs no framework."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_oktopk import (
    AgreementError,
    NonFiniteError,
    OkTopk,
    OptionError,
    PluginError,
    StepAhead,
    TopkA,
)
from horovod_oktopk.reducer.layout import Layout
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator
from horovod_oktopk.step_ahead.reducer import StepAheadReducer
from horovod_oktopk.step_ahead.replica import HostReplica
from horovod_oktopk.transport.local import run_ranks

from ..support.network import ThreadNetwork
from ..support.simulation import same_bits

ENTRIES = [("a", (50, 4), "float32"), ("b", (3,), "float32"), ("c", (97,), "float32")]
N = 300
OPTIONS = StepAhead(OkTopk(density=0.05, threshold_interval=4, region_interval=5))


class Worker:
    """One rank with a model of three arrays; `step` moves them by what it is given."""

    def __init__(self, transport: Any, options: StepAhead = OPTIONS, start: float = 1.0, average: bool = True,
                 entries: Any = ENTRIES) -> None:
        self.network = ThreadNetwork(transport)
        layout = Layout(entries)
        random = np.random.default_rng(7)
        self.parameters = [start * random.standard_normal(int(np.prod(shape))).astype(dtype)
                           for _, shape, dtype in entries]
        self.accumulator = NumpyParameterAccumulator(layout.n, layout.dtype)
        self.reducer = StepAheadReducer(options, average, layout, self.accumulator,
                                        HostReplica(layout, lambda: self.parameters), self.network)
        self.moved = np.zeros(layout.n, np.float64)

    @property
    def p(self) -> np.ndarray:
        return np.concatenate(self.parameters)

    @property
    def w(self) -> np.ndarray:
        return self.accumulator.shared

    def step(self, move: np.ndarray) -> None:
        """Moves p by -λ · move."""
        self.reducer.begin_step()
        before = self.p.astype(np.float64)
        for offset, own in zip(self.reducer.layout.offsets, self.parameters, strict=False):
            own -= (self.reducer.coefficient * move[offset:offset + len(own)]).astype(own.dtype)
        self.moved += self.p - before
        self.reducer.end_step()


def moves(rank: int, steps: int, scale: float = 0.1, n: int = N) -> np.ndarray:
    return (scale * np.random.default_rng(rank).standard_normal((steps, n)) ** 3).astype(np.float32)


def train(size: int, options: StepAhead = OPTIONS, steps: int = 12, **arguments: Any) -> list[Worker]:
    def program(transport: Any) -> Worker:
        worker = Worker(transport, options, **arguments)
        for move in moves(transport.rank, steps):
            worker.step(move)
        worker.reducer.catch_up()
        return worker

    return run_ranks(size, program)


@pytest.mark.slow
def test_thousands_of_steps_of_very_different_magnitude_do_not_drift():
    size, steps = 2, 2000
    scales = np.float32(10.0) ** np.linspace(-4, 2, N, dtype=np.float32)

    def program(transport):
        worker = Worker(transport, StepAhead(OkTopk(density=0.02)))
        for move in moves(transport.rank, steps, 1e-3):
            worker.step(move * scales)
        worker.reducer.catch_up()
        return worker

    workers = run_ranks(size, program)
    assert same_bits(workers[0].w, workers[1].w)
    weight = size * workers[0].reducer.coefficient
    start = Worker(None).p.astype(np.float64)
    error = weight * (workers[0].w - start) - sum(w.moved - (w.p.astype(np.float64) - w.w) for w in workers)
    # An element is applied at most `steps` times, each with three roundings to half a unit in the last place.
    largest = np.maximum(np.abs(start), sum(np.abs(w.moved) for w in workers)) + 1
    assert (np.abs(error) <= weight * np.sqrt(steps) * 8 * np.finfo(np.float32).eps * largest).all()


@pytest.mark.slow
def test_the_shared_parameters_have_the_same_bits_after_each_of_many_steps():
    options = StepAhead(OkTopk(density=0.02, value_dtype="log4", global_density=0.04))

    def program(transport):
        worker, random, digests = Worker(transport, options), np.random.default_rng(transport.rank), []
        for _ in range(1000):
            worker.step(0.01 * random.standard_normal(N, np.float32))
            digests.append(hash(worker.w.tobytes()))
        return digests

    runs = run_ranks(3, program)
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0])) == 1000, "every step moves them, but the first, which applies nothing"


# The beginning.

def test_ranks_that_begin_with_other_parameters_all_learn_it():
    def program(transport):
        worker = Worker(transport, start=1.0 + transport.rank)
        with pytest.raises(AgreementError, match=r"must be the same everywhere .*hvd\.broadcast_parameters"):
            worker.step(moves(0, 1)[0])

    run_ranks(2, program)


@pytest.mark.parametrize("other", [StepAhead(OkTopk(density=0.1)), StepAhead(TopkA(density=0.05)),
                                   replace(OPTIONS, ahead=0.3), replace(OPTIONS, local_steps=2)], ids=str)
def test_ranks_with_other_options_all_learn_it(other):
    def program(transport):
        worker = Worker(transport, other if transport.rank else OPTIONS)
        with pytest.raises(AgreementError):
            worker.step(moves(0, 1)[0])

    run_ranks(2, program)


@pytest.mark.parametrize(("options", "message"), [
    ({"ahead": 0}, r"ahead must be in \(0, 1\]"), ({"ahead": 1.5}, r"ahead must be in \(0, 1\]"),
    ({"local_steps": 0}, "local_steps must be an integer of at least 1"), ({"overlap": 1}, "True or False"),
    ({"inner": "solo"}, "StepAhead takes Dense")])
def test_options_that_are_not_allowed_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        StepAhead(**options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_in_16_bits_are_refused_by_name(dtype):
    layout = Layout([*ENTRIES, ("half", (5,), dtype)])
    with pytest.raises(PluginError, match=f"'half' has {dtype}"):
        StepAheadReducer(OPTIONS, True, layout, NumpyParameterAccumulator(layout.n), HostReplica(layout, list),
                         ThreadNetwork(None))


# What is not finite.

def test_a_rank_that_skips_its_own_step_is_named_and_the_exchange_goes_on(caplog):
    def program(transport):
        worker = Worker(transport)
        worker.reducer.begin_step()
        if transport.rank == 1:
            worker.reducer.skip_local_step()
        worker.reducer.end_step()
        worker.reducer.catch_up()
        return worker

    workers = run_ranks(2, program)
    assert same_bits(workers[0].w, workers[1].w)
    assert caplog.messages == ["the gradients of rank 1 are not finite, so it takes no step of its own"]


@pytest.mark.parametrize("overlap", [True, False])
def test_parameters_that_are_not_finite_end_the_step_on_all_ranks_and_leave_the_shared_ones(overlap):
    def program(transport):
        worker = Worker(transport, replace(OPTIONS, overlap=overlap))
        worker.step(moves(transport.rank, 1)[0])
        worker.reducer.catch_up()
        before = worker.w.copy()
        with pytest.raises(NonFiniteError, match=r"ranks \[1\] are not finite"):  # noqa: PT012 - now or in the next step
            worker.step(np.full(N, np.nan if transport.rank == 1 else 0.1, np.float32))
            worker.reducer.begin_step()
        return same_bits(before, worker.w) and np.isfinite(worker.w).all()

    assert run_ranks(3, program) == [True] * 3


@pytest.mark.parametrize("value_dtype", [None, "log4"])
def test_a_sum_that_overflows_leaves_the_shared_parameters(value_dtype):
    def program(transport):
        worker = Worker(transport, StepAhead(OkTopk(density=0.05, value_dtype=value_dtype), ahead=1.0))
        with pytest.raises(NonFiniteError, match="their sum is not"):  # noqa: PT012 - in the next step
            worker.step(np.full(N, 3e38, np.float32))
            worker.reducer.begin_step()
        return bool(np.isfinite(worker.w).all())

    assert run_ranks(2, program) == [True] * 2


# What all ranks share, to be read.

def test_inside_shared_the_model_holds_what_all_ranks_share_also_where_an_error_ends_it():
    def program(transport):
        worker = Worker(transport)
        for move in moves(transport.rank, 3):
            worker.step(move)
        worker.reducer.catch_up()
        own, shared = worker.p, worker.w.copy()
        assert not same_bits(own, shared)
        with pytest.raises(KeyError), worker.reducer.shared():  # noqa: PT012 - what is inside is seen
            assert same_bits(worker.p, shared)
            with worker.reducer.shared():
                assert same_bits(worker.p, shared)
            with pytest.raises(PluginError, match="inside shared_parameters"):
                worker.reducer.begin_step()
            raise KeyError
        return same_bits(worker.p, own) and same_bits(worker.w, shared)

    assert run_ranks(2, program) == [True, True]


@pytest.mark.parametrize("changes", [[False, True], [True, True]])
@pytest.mark.parametrize("alike", [True, False])
def test_what_changes_inside_shared_must_change_on_all_ranks_alike(changes, alike):
    def program(transport):
        worker = Worker(transport)
        mine = moves(transport.rank, 8)
        for move in mine[:4]:
            worker.step(move)
        with worker.reducer.shared():
            worker.parameters[1] += 0.5 * changes[transport.rank] * (1 if alike else 1 + transport.rank)
        try:
            for move in mine[4:]:
                worker.step(move)
            worker.reducer.catch_up()
        except AgreementError as error:
            return "shared_parameters" in str(error)
        return worker.w.tobytes()

    first, second = run_ranks(2, program)
    if alike and changes[0]:
        assert isinstance(first, bytes)
        assert first == second
    else:
        assert first is True
        assert second is True


def test_what_is_suspended_inside_shared_stays_so_until_its_next_step():
    def program(transport):
        worker = Worker(transport)
        mine = moves(transport.rank, 8)
        for move in mine[:4]:
            worker.step(move)
        with worker.reducer.shared():
            shared = worker.p
            worker.reducer.suspend()
        assert same_bits(worker.p, shared)
        worker.reducer.begin_step()
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
        worker.reducer.finish()

    run_ranks(2, program)
    assert [record.message[:30] for record in caplog.records] == ["shared_parameters was never en"] * told


def test_parameters_of_several_dtypes_are_refused():
    with pytest.raises(PluginError, match="one dtype; 'b' has float64, and '.*' has float32: .*make two optimizers"):
        Worker(None, entries=[ENTRIES[0], ("b", (3,), "float64"), ENTRIES[2]])


def test_the_density_can_be_changed_between_steps():
    def program(transport):
        worker = Worker(transport, replace(OPTIONS, overlap=False))
        seen = []
        for density, move in zip([None, 0.2, 0.01, None], moves(transport.rank, 4), strict=True):
            worker.reducer.set_density(density)
            worker.step(move)
            seen.append(worker.reducer.report.k)
        return seen

    assert run_ranks(2, program) == [[15, 60, 3, 15]] * 2


@settings(max_examples=15, deadline=None)
@given(size=st.integers(1, 5), density=st.floats(0.005, 1), ahead=st.floats(0.1, 1), overlap=st.booleans(),
       local_steps=st.integers(1, 3))
def test_whatever_the_options_replicas_agree_and_nothing_is_lost(size, density, ahead, overlap, local_steps):
    options = StepAhead(OkTopk(density=density), ahead=ahead, overlap=overlap, local_steps=local_steps)
    workers = train(size, options, steps=5)
    assert all(same_bits(worker.w, workers[0].w) for worker in workers)
    start = Worker(None).p.astype(np.float64)
    applied = size * ahead * (workers[0].w - start) + sum(w.p.astype(np.float64) - w.w for w in workers)
    assert np.allclose(applied, sum(w.moved for w in workers), atol=1e-4)

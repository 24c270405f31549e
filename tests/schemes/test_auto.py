"""strategy="auto": all ranks take the same way at every step, and no way loses anything."""

from __future__ import annotations

import json

import numpy as np
import pytest

from horovod_oktopk import OkTopk, timing
from horovod_oktopk.schemes import auto
from horovod_oktopk.schemes.algorithm import Step
from horovod_oktopk.schemes.auto import TRIAL, AutoAllreduce, Strategy, dense_seconds
from horovod_oktopk.schemes.oktopk import OkTopkAllreduce
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.timing import SAMPLES
from horovod_oktopk.transport.counting import CountingTransport
from horovod_oktopk.transport.local import run_ranks

from ..support.gradients import Case
from ..support.simulation import Rank, advance, keeping, new_ranks, same_bits, same_runs, simulate
from .test_conservation import assert_conserved, assert_lawful, assert_replicas_agree

CASE = Case("steady", 400, 30, 5, TRIAL + 8, seed=8)
HALF = TRIAL // 2


def taking(strategy, **options):
    """Makes algorithms that take this way after their trial."""
    def make(description):
        algorithm = OkTopk(strategy="auto", **options).build(description)
        algorithm._fastest = lambda step: strategy
        return algorithm

    return make


def ways(run):
    return [record.report.strategy for record in (ranks[0] for ranks in run)]


def assert_all_is_applied(ranks):
    for record in ranks:
        assert same_bits(record.update.values, np.sum([other.acc for other in ranks], axis=0))
        assert not record.residual.any()


@pytest.mark.parametrize("strategy", Strategy)
def test_the_trial_splits_then_gathers_and_then_the_fastest_way_is_taken(strategy):
    run = simulate(CASE.gradients(), CASE.k, make=taking(strategy))
    assert ways(run) == ["split"] * HALF + ["gather"] * HALF + [strategy.name.lower()] * 8
    assert all({record.report.strategy for record in ranks} == {ranks[0].report.strategy} for ranks in run)


@pytest.mark.parametrize("global_k", [10, 30, 70, 150])
@pytest.mark.parametrize("strategy", [Strategy.SPLIT, Strategy.GATHER])
def test_splitting_and_gathering_have_the_bits_of_oktopk(strategy, global_k):
    gradients = Case("normal", CASE.n, CASE.k, CASE.size, CASE.steps, seed=3).gradients()
    run = simulate(gradients, CASE.k, make=taking(strategy, k=CASE.k, global_density=global_k / CASE.n))
    assert same_runs(run, simulate(gradients, CASE.k, make=keeping(global_k, CASE)))
    assert len(run[-1][0].update) == global_k or len(run[-1][0].update) < global_k == 150
    assert run[-1][0].report.global_k == global_k
    assert_lawful(run, CASE.k)


def test_a_dense_step_applies_everything_and_leaves_nothing():
    for ranks in simulate(CASE.gradients(), CASE.k, make=taking(Strategy.DENSE))[TRIAL:]:
        assert_all_is_applied(ranks)
        assert ranks[0].report.payload_bytes()[0] == 2 * 4 * CASE.n * (CASE.size - 1) // CASE.size


@pytest.mark.parametrize("value_dtype", ["float16", "bfloat16", "log4"])
def test_gathering_rounded_values_conserves(value_dtype):
    gradients = np.random.default_rng(0).integers(-2**15, 2**15, (TRIAL + 2, 3, 300)).astype(np.float32) / 2**12
    for ranks in simulate(gradients, 20, make=taking(Strategy.GATHER, value_dtype=value_dtype))[HALF:]:
        assert_replicas_agree(ranks)
        update = ranks[0].update
        before = np.sum([record.acc.astype(np.float64) for record in ranks], axis=0)
        after = np.sum([record.residual.astype(np.float64) for record in ranks], axis=0)
        after[update.indices] += update.values
        assert (before == after).all()


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_one_bad_element_drops_the_step_on_all_ranks(strategy, value):
    ranks = new_ranks(CASE.size, CASE.n, make=taking(strategy))
    before = advance(ranks, CASE.gradients()[:TRIAL + 1], CASE.k)[-1]
    spoiled = CASE.gradients()[TRIAL + 1:TRIAL + 2] / 2
    spoiled[0, 2, 17] = value
    for old, record in zip(before, advance(ranks, spoiled, CASE.k)[0], strict=True):
        assert record.update is None
        assert record.report.finite is False
        assert same_bits(record.residual, old.residual)
    assert ways(advance(ranks, CASE.gradients()[TRIAL + 1:], CASE.k)) == [strategy.name.lower()] * 7


@pytest.mark.parametrize("strategy", [Strategy.GATHER, Strategy.DENSE])
def test_where_k_changes_there_is_a_new_trial(strategy):
    ranks = new_ranks(CASE.size, CASE.n, make=taking(strategy))
    advance(ranks, CASE.gradients(), CASE.k)
    run = advance(ranks, CASE.gradients(), CASE.k // 2)
    assert ways(run) == ["split"] * HALF + ["gather"] * HALF + [strategy.name.lower()] * 8
    assert_lawful(run[:TRIAL], CASE.k // 2)


@pytest.mark.parametrize("stop", [HALF + 3, *(pytest.param(stop, marks=pytest.mark.slow)
                                              for stop in (1, HALF, TRIAL, TRIAL + 3))])
@pytest.mark.parametrize("strategy", Strategy)
def test_a_resumed_run_has_the_same_bits(strategy, stop):
    gradients, make = CASE.gradients(), taking(strategy)
    ranks = new_ranks(CASE.size, CASE.n, make=make)
    before = advance(ranks, gradients[:stop], CASE.k)
    fresh = new_ranks(CASE.size, CASE.n, make=make)
    for old, new in zip(ranks, fresh, strict=True):
        new.scheme.load_state(json.loads(json.dumps(old.scheme.state())))
        new.accumulator.residual[:] = old.accumulator.residual
    run, whole = before + advance(fresh, gradients[stop:], CASE.k), simulate(gradients, CASE.k, make=make)
    assert ways(run) == ways(whole)
    timed = Strategy.SPLIT, Strategy.GATHER
    assert {len(rank.scheme._seconds[each]) for rank in fresh for each in timed} == {SAMPLES}
    for ranks_of_run, ranks_of_whole in zip(run, whole, strict=True):
        for one, other in zip(ranks_of_run, ranks_of_whole, strict=True):
            assert same_bits(one.update.values, other.update.values)
            assert same_bits(one.residual, other.residual)


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("at", [HALF + 2, *(pytest.param(at, marks=pytest.mark.slow) for at in (2, TRIAL + 2))])
@pytest.mark.parametrize("newcomer", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_with_a_newcomer_all_begin_a_new_trial_together(strategy, at, newcomer):
    make = taking(strategy)
    ranks = new_ranks(CASE.size, CASE.n, make=make)
    advance(ranks, CASE.gradients()[:at], CASE.k)
    ranks[newcomer] = Rank(make("test: yes"), NumpyAccumulator(CASE.n))
    run = advance(ranks, CASE.gradients(), CASE.k)
    assert ways(run) == ["split"] * HALF + ["gather"] * HALF + [strategy.name.lower()] * 8
    assert_lawful(run[:TRIAL], CASE.k)


def test_ranks_whose_trials_began_at_different_steps_begin_a_new_one():
    """As after checkpoints of different runs: they would else go over to the next part at different steps."""
    ranks = new_ranks(CASE.size, CASE.n, make=taking(Strategy.DENSE))
    advance(ranks, CASE.gradients()[:HALF - 2], CASE.k)
    ranks[2].scheme.since -= 1
    run = advance(ranks, CASE.gradients(), CASE.k)
    assert ways(run)[:TRIAL] == ["split"] * HALF + ["gather"] * HALF
    assert_lawful(run[:TRIAL], CASE.k)


def test_another_number_of_ranks_begins_a_new_trial():
    ranks = new_ranks(CASE.size, CASE.n, make=taking(Strategy.DENSE))
    advance(ranks, CASE.gradients(), CASE.k)
    run = advance(ranks[:3], CASE.gradients()[:, :3], CASE.k)
    assert ways(run)[0] == "split"
    assert ways(run)[-1] == "dense"
    assert_lawful(run[:TRIAL], CASE.k)


@pytest.mark.parametrize(("seconds", "expected"), [
    ([(1, 2, 3), (1, 2, 3)], Strategy.SPLIT), ([(1, 2, 3), (4, 2, 3)], Strategy.GATHER),
    ([(3, 3, 2), (3, 9, 1)], Strategy.DENSE)])
def test_the_slowest_rank_decides(seconds, expected, monkeypatch):
    """(split, gather, dense) of each rank."""
    monkeypatch.setattr(auto, "dense_seconds", lambda n, dtype, limit, transport: max(row[2] for row in seconds))

    def program(transport):
        algorithm = OkTopk(strategy="auto").build("a: 1")
        split, gather = seconds[transport.rank][:2]
        algorithm._seconds |= {Strategy.SPLIT: [split], Strategy.GATHER: [gather]}
        step = Step(NumpyAccumulator(10), 1, True, CountingTransport(transport), StepReport(1, 10, 1))
        return algorithm._fastest(step)

    assert run_ranks(2, program) == [expected] * 2


class Slow:
    """A transport whose allreduce takes a known time, as the clock below shows: 1 s, and 10 µs for each element that
    does not fit a switch's buffer."""

    rank, size, buffer = 0, 1, 1 << 19
    now, longest = 0.0, 0
    hosts = None

    @property
    def everyone(self):
        return self

    def allgather(self, row):
        return row[None]

    def allreduce(self, values):
        self.now += 1 + 1e-5 * max(0, len(values) - self.buffer)
        self.longest = max(self.longest, len(values))
        return values


@pytest.mark.parametrize("n", [10, 1 << 18, 10_000_000])
def test_a_dense_allreduce_is_timed_whole_before_it_is_taken(n, monkeypatch):
    slow = Slow()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: slow.now)
    assert dense_seconds(n, np.float32, 1e3, slow) == pytest.approx(1 + 1e-5 * max(0, n - slow.buffer))


def test_no_more_is_timed_than_tells_that_dense_is_slower(monkeypatch):
    slow = Slow()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: slow.now)
    assert dense_seconds(100_000_000, np.float32, 5.0, slow) > 5
    assert slow.longest == 1 << 20


def test_the_option_chooses_the_algorithm():
    assert isinstance(OkTopk(strategy="auto").build("a: 1"), AutoAllreduce)
    assert type(OkTopk().build("a: 1")) is OkTopkAllreduce


def test_a_sum_that_nobody_forced_is_conserved_too():
    """With the real clock, whatever is fastest here."""
    run = simulate(CASE.gradients(), CASE.k, strategy="auto")
    for ranks in run:
        for record in ranks:
            if record.report.strategy == "dense":
                assert_all_is_applied(ranks)
            else:
                assert_conserved(record)

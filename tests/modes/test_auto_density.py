"""`density="auto"`: the search by itself, and on ranks that are threads, by a clock of their own."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk import OkTopk, OptionError, SameBlocks, StepAhead, TopkA
from horovod_oktopk.modes import auto_density
from horovod_oktopk.modes.auto_density import COUNTED, SKIPPED, DensityControl, search
from horovod_oktopk.modes.options import Partial
from horovod_oktopk.schemes.options import DENSITIES, Scheme
from tests.modes.step_ahead.test_mode import Worker, moves
from tests.modes.test_gradient_mode import make, take_step
from tests.support.threads import run_ranks

FREE = 5
"""The largest level that costs nothing, by the clock of the ranks here."""
TOP = len(DENSITIES) - 1


def found_by(seconds_of: Any, steps: int, start: int = 0) -> list[int]:
    """Return the levels of this many steps, each of which takes `seconds_of` its level."""
    control = search(DENSITIES, start)
    levels = [next(control)]
    while len(levels) < steps:
        levels.append(control.send(seconds_of(levels[-1])))
    return levels


@given(free=st.integers(0, TOP), slope=st.floats(0.06, 10))
def test_the_largest_level_is_found_that_costs_nothing_and_soon(free, slope):
    levels = found_by(lambda level: 0.1 * (1 + 0.04 * level / TOP + slope * max(0, level - free)), 400)
    assert levels[-1] == levels[300] == free
    assert levels[:SKIPPED + COUNTED] == [0] * (SKIPPED + COUNTED)


def test_a_level_that_is_no_longer_free_is_left_when_the_levels_are_tried_again():
    seen: list[int] = []

    def seconds(level: int) -> float:
        seen.append(level)
        return 1.0 + max(0, level - (8 if len(seen) < 700 else 3))

    levels = found_by(seconds, 3000)
    assert (levels[400], levels[-1]) == (8, 3)


def test_a_slow_step_now_and_then_changes_nothing():
    rare = iter(range(10**6))
    assert found_by(lambda level: (9.0 if next(rare) % 5 == 0 else 1.0) + max(0, level - 6), 400)[-1] == 6


def test_a_search_begins_at_a_level_that_was_found_before():
    assert found_by(lambda level: 1.0, auto_density.FIRST_REST, start=7) == [7] * auto_density.FIRST_REST


class Clock(threading.local):
    """The clock of a rank: a thread."""

    now = 1.0

    def __call__(self) -> float:
        return self.now

    def take_step(self, scheme: Scheme) -> None:
        self.now += 1.0 if scheme.present_density <= scheme.densities[FREE] else 2.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(DensityControl, "clock", clock)
    monkeypatch.setattr(auto_density, "SKIPPED", 2)
    monkeypatch.setattr(auto_density, "COUNTED", 3)
    monkeypatch.setattr(auto_density, "FIRST_REST", 60)
    return clock


OPTIONS = {"step_ahead": StepAhead(OkTopk(density="auto", region_interval=5)),
           "without_overlap": StepAhead(TopkA(density="auto"), overlap=False),
           "same_blocks": StepAhead(SameBlocks(density="auto"))}
STEPS = 70


def trained(transport: Any, clock: Clock, options: StepAhead, levels: list[float] | None = None,
            ) -> tuple[Worker, list[float], list[int]]:
    """Take steps; return the worker, the densities in the reports, and a hash of w, of each step.

    `levels`: densities to be set.
    """
    worker, densities, seen = Worker(transport, options), {}, []
    for step, move in enumerate(moves(transport.rank, STEPS)):
        if levels is not None:
            worker.reducer.set_density(levels[step])
        worker.step(move)
        clock.take_step(worker.reducer.reduction.scheme)
        seen.append(hash(worker.w.tobytes()))
        if worker.reducer.report is not None:
            densities[worker.reducer.report.step] = worker.reducer.report.density
    worker.reducer.catch_up()
    densities[STEPS] = worker.reducer.report.density
    return worker, [densities[step] for step in range(1, STEPS + 1)], seen


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", [2, 3, pytest.param(17, marks=pytest.mark.slow)])
def test_ranks_change_together_find_the_level_and_a_replay_has_the_same_bits(options, size, clock):
    workers, densities, seen = zip(*run_ranks(size, lambda t: trained(t, clock, options)), strict=True)
    assert all(each == densities[0] for each in densities), "all ranks have the same density at each step"
    assert all(each == seen[0] for each in seen), "and the same bits"
    assert len(set(densities[0])) > 4
    assert {each.reducer.reduction.scheme.present_density for each in workers} == {
        options.scheme.densities[FREE]}
    fixed = StepAhead(replace(options.scheme, density=0.01), overlap=options.overlap)
    _, again, replayed = zip(*run_ranks(size, lambda t: trained(t, clock, fixed, densities[0])), strict=True)
    assert again[0] == densities[0]
    assert replayed == seen


def test_gradients_have_it_too_and_nothing_is_lost(clock):
    def program(transport):
        reducer, total, sent = make(transport, options=OkTopk(density="auto")), 0.0, 0.0
        for step in range(STEPS):
            random = np.random.default_rng((step, transport.rank))
            gradient = random.standard_normal(reducer.reduction.layout.n, np.float32)
            total = total + gradient.astype(np.float64)
            sent = sent + take_step(reducer, gradient.copy())
            clock.take_step(reducer.reduction.scheme)
        return total, sent, reducer.read_residual(), reducer.reduction.scheme.present_density

    totals, sent, residuals, found = zip(*run_ranks(3, program), strict=True)
    assert set(found) == {DENSITIES[FREE]}
    np.testing.assert_allclose(sent[0] + sum(each.astype(np.float64) for each in residuals), sum(totals), atol=1e-3)


def test_a_resumed_run_goes_on_at_the_level_and_one_with_other_ranks_begins_anew(clock):
    def program(transport):
        first, *_ = trained(transport, clock, OPTIONS["step_ahead"])
        with first.reducer.shared():
            record = first.reducer.records()[0]
            second = Worker(transport, OPTIONS["step_ahead"])
            second.parameters = [own.copy() for own in first.parameters]
        second.reducer.load([record])
        second.take(moves(transport.rank, 3))
        found = second.reducer.reduction.scheme.present_density
        second.ranks.become(is_alone=True)
        second.reducer.reduction.reset_if_membership_changed()
        return record["level"], found, second.reducer.reduction.scheme.present_density

    first, *_ = run_ranks(2, program)
    assert first == (FREE, DENSITIES[FREE], DENSITIES[0]), "rank 0 decides"


def test_the_search_goes_on_where_training_was_put_aside_and_a_record_has_what_was_found(clock):
    """Keras' fit does so at its end; the run is saved while a level is tried that turns out to cost too much."""
    def program(transport):
        worker, levels = Worker(transport, OPTIONS["step_ahead"]), []
        for number, move in enumerate(moves(transport.rank, 300)):
            worker.step(move)
            clock.take_step(worker.reducer.reduction.scheme)
            if number % 20 == 19:
                level = DENSITIES.index(worker.reducer.reduction.scheme.present_density)
                worker.reducer.suspend()
                levels.append((level, worker.reducer.records()[0]["level"]))
        return levels, worker.reducer.reduction.scheme.present_density

    (levels, found), (_, other) = run_ranks(2, program)
    assert found == other == DENSITIES[FREE]
    assert any(level > FREE for level, _ in levels)
    assert {kept for _, kept in levels} == {0, FREE}


def test_a_density_that_is_set_takes_over_until_it_is_given_back(clock):
    def program(transport):
        worker, *_ = trained(transport, clock, OPTIONS["step_ahead"])
        worker.reducer.set_density(0.5)
        found = []
        for move in moves(transport.rank, 2 * STEPS):
            worker.step(move)
            clock.take_step(OkTopk(density=1.0))
            found.append(worker.reducer.reduction.scheme.present_density)
            if len(found) == STEPS:
                worker.reducer.set_density(None)
        return set(found[:STEPS]), found[STEPS]

    assert run_ranks(2, program) == [({0.5}, DENSITIES[0])] * 2


def test_to_give_the_density_back_again_and_again_leaves_the_search_alone(clock):
    """A program with a warm-up does so at each epoch."""
    def program(transport):
        worker, *_ = trained(transport, clock, OPTIONS["step_ahead"])
        worker.reducer.set_density(None)
        worker.take(moves(transport.rank, 3))
        return worker.reducer.reduction.scheme.present_density

    assert run_ranks(2, program) == [DENSITIES[FREE]] * 2


@pytest.mark.parametrize("make_options", [
    lambda: Partial(OkTopk(density="auto")), lambda: OkTopk(density="auto", hierarchical=True),
    lambda: OkTopk(density="all")])
def test_what_cannot_be_measured_is_refused(make_options):
    with pytest.raises(OptionError, match="density"):
        make_options()

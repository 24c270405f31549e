"""The trial that finds the best buckets of gradients: its plans are optimal, and its choice is what was measured."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk import OkTopk
from horovod_oktopk.reducer.bucket_trial import BucketTrial, Sample, plan
from horovod_oktopk.reducer.layout import Layout
from horovod_oktopk.timing import SAMPLES, WARM_UP
from tests.reducer.test_flat import N, make, on_ranks, take_step

STEPS = WARM_UP + SAMPLES
LAYOUT = Layout([(f"p{i}", (100,), "float32") for i in range(6)])
ORDER = [5, 4, 3, 2, 1, 0]


def finish(ends, ready, lengths, latency, per_element):
    """When the last bucket is reduced, one bucket after the other."""
    time = 0.0
    for start, end in itertools.pairwise([0, *ends]):
        time = max(time, max(ready[start:end])) + latency + per_element * sum(lengths[start:end])
    return time


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=7), st.integers(0, 12),
       st.integers(0, 3))
def test_no_other_groups_end_earlier(gradients, latency, per_element):
    ready, lengths = (list(column) for column in zip(*gradients, strict=True))
    m = len(ready)
    every = [[*inner, m] for count in range(m) for inner in itertools.combinations(range(1, m), count)]
    best = min(finish(ends, ready, lengths, latency, per_element) for ends in every)
    ends = plan(np.array(ready, float), np.array(lengths), latency, per_element)
    assert ends in every
    assert finish(ends, ready, lengths, latency, per_element) == best


def test_groups_are_merged_while_the_wait_is_shorter_than_the_latency():
    lengths = np.full(4, 10)
    assert plan(np.array([0.0, 1, 2, 3]), lengths, 100.0, 0.01) == [4]
    assert plan(np.array([0.0, 1, 2, 3]), lengths, 0.0, 0.05) == [1, 2, 3, 4]
    assert plan(np.array([0.0, 0, 10, 10]), lengths, 1.0, 0.1) == [2, 4]


def run_trial(transport, whole_of, reducing_of, ready=None):
    """The buckets that a trial tries, and what it ends with; steps take whole_of(buckets, rank) seconds."""
    trial, buckets, tried = BucketTrial(LAYOUT, ORDER), [tuple(range(6))], []
    ready = np.array([5.0, 4, 3, 2, 1, 0]) if ready is None else ready
    for _ in range(10 * STEPS):
        if trial.over:
            return tried, buckets
        if len(tried) == 0 or tried[-1] != buckets:
            tried.append(buckets)
        sample = Sample(ready, reducing_of(buckets), whole_of(buckets, transport.rank))
        buckets = trial.learn(sample, transport) or buckets
    raise AssertionError("the trial does not end")


def test_one_group_then_two_then_the_plan_are_tried_and_the_fastest_is_taken():
    def program(transport):
        # α = 0.1 s and 1/600 s an element: a gradient takes 0.27 s, and another is ready after each second.
        tried, chosen = run_trial(transport, lambda buckets, _: 10 - len(buckets),
                                  lambda buckets: 1 + 0.1 * len(buckets))
        return tried, chosen

    one, two, six = [(0, 1, 2, 3, 4, 5)], [(3, 4, 5), (0, 1, 2)], [(5,), (4,), (3,), (2,), (1,), (0,)]
    assert on_ranks(2, program) == [([one, two, six], six)] * 2


def test_a_plan_that_is_slower_in_fact_is_not_taken():
    def program(transport):
        return run_trial(transport, lambda buckets, _: len(buckets), lambda _: 1.0)[1]

    assert on_ranks(2, program) == [[(0, 1, 2, 3, 4, 5)]] * 2


def test_the_slowest_rank_decides_for_all():
    def program(transport):
        return run_trial(transport, lambda buckets, rank: len(buckets) * (1 if rank == 2 else -0.1), lambda _: 1.0)[1]

    assert on_ranks(3, program) == [[(0, 1, 2, 3, 4, 5)]] * 3


def test_what_a_group_costs_is_the_time_of_the_rank_that_waits_for_nobody():
    def program(transport):
        one = 1.0 + 4 * transport.rank  # the others wait for rank 0

        def reducing(buckets):
            return one + (0.1 if transport.rank == 0 else 3.0) * (len(buckets) - 1)

        return [len(buckets) for buckets in run_trial(transport, lambda buckets, _: 1.0, reducing)[0]]

    assert on_ranks(2, program) == [[1, 2, 6]] * 2


def test_a_group_costs_at_least_five_rounds_of_messages(monkeypatch):
    monkeypatch.setattr("horovod_oktopk.reducer.bucket_trial._seconds_of_a_round", lambda _: 2.0)

    def program(transport):
        return run_trial(transport, lambda buckets, _: 1.0, lambda _: 1.0)[0]

    assert on_ranks(1, program) == [[[(0, 1, 2, 3, 4, 5)], [(3, 4, 5), (0, 1, 2)]]]


def test_steps_that_settle_do_not_count():
    def program(transport):
        seen = {}

        def whole(buckets, _):
            seen[len(buckets)] = seen.get(len(buckets), 0) + 1
            if len(buckets) != 2:
                return 2.0
            return [100.0, 100.0, 100.0, 1.0, 1.0, 1.0, 3.0, 3.0][seen[2] - 1]

        return run_trial(transport, whole, lambda buckets: float(len(buckets)))[1]

    assert on_ranks(1, program) == [[(3, 4, 5), (0, 1, 2)]]


def test_gradients_that_are_ready_at_once_are_one_group():
    def program(transport):
        return run_trial(transport, lambda buckets, _: len(buckets), lambda buckets: 1 + 0.1 * len(buckets),
                         ready=np.zeros(6))

    assert on_ranks(1, program) == [([[(0, 1, 2, 3, 4, 5)], [(3, 4, 5), (0, 1, 2)]], [(0, 1, 2, 3, 4, 5)])]


AUTO = OkTopk(density=0.1, bucket_bytes="auto")


def gradient(step, rank):
    return np.random.default_rng((step, rank)).integers(-9, 10, N).astype(np.float32)


def take_timed_step(reducer, step, rank):
    """More buckets are faster."""
    update = take_step(reducer, gradient(step, rank))
    reducer.learn(Sample(np.array([1.0, 0.0]), 1.0, 1.0 / len(reducer.buckets)))
    return update


@pytest.mark.parametrize("size", [1, 3])
def test_nothing_is_lost_when_groups_change(size):
    def program(transport):
        reducer, applied, numbers = make(transport, options=AUTO), np.zeros(N), []
        for step in range(3 * STEPS):
            applied += take_timed_step(reducer, step, transport.rank)
            numbers.append(len(reducer.buckets))
        assert "bucket 1 of 2: b" in reducer.description
        return applied, reducer.read_residual(), numbers, reducer.report.step

    outcome = on_ranks(size, program)
    computed = sum(gradient(step, rank) for step in range(3 * STEPS) for rank in range(size))
    assert np.array_equal(outcome[0][0] + sum(residual for _, residual, *_ in outcome), computed)
    assert {tuple(numbers) for _, _, numbers, _ in outcome} == {(1,) * (STEPS - 1) + (2,) * (2 * STEPS + 1)}
    assert {step for *_, step in outcome} == {3 * STEPS}


def test_a_trial_begins_anew_where_what_it_measured_changes():
    def program(transport):
        reducer = make(transport, options=AUTO)
        numbers = []

        def train():
            for step in range(2 * STEPS):
                take_timed_step(reducer, step, transport.rank)
            numbers.append((len(reducer.buckets), reducer.trial.over))

        train()
        reducer.set_density(0.1)
        numbers.append(len(reducer.buckets))
        held = reducer.read_residual()
        reducer.set_density(0.2)
        numbers.append(len(reducer.buckets))
        same = np.array_equal(held, reducer.read_residual())
        train()
        reducer.load([reducer.record()])
        numbers.append((len(reducer.buckets), reducer.trial.over))
        return numbers, same

    assert on_ranks(2, program) == [([(2, True), 2, 1, (2, True), (2, True)], True)] * 2


def test_a_step_that_is_undone_teaches_nothing():
    def program(transport):
        reducer = make(transport, options=AUTO)
        for _ in range(2 * STEPS):
            take_step(reducer, np.full(N, np.nan, np.float32))
            reducer.learn(Sample(np.zeros(2), 1.0, 1.0))
        return len(reducer.buckets), reducer.trial.over

    assert on_ranks(2, program) == [(1, False)] * 2


def test_without_auto_there_is_no_trial():
    for options in (OkTopk(density=0.1), replace(AUTO, bucket_bytes=1)):
        assert on_ranks(1, lambda transport, options=options: make(transport, options=options).trial) == [None]


def test_other_ranks_begin_a_trial_anew():
    """Also where rank and size are what they were."""
    def program(transport):
        reducer = make(transport, options=AUTO)
        for step in range(2 * STEPS):
            take_timed_step(reducer, step, 0)
        held, before = reducer.read_residual(), (reducer.is_connected, len(reducer.buckets), reducer.trial.over)
        reducer.network.resets = 1
        assert reducer.buckets[0].algorithm.boundaries is not None
        after = reducer.is_connected, reducer.connect() and len(reducer.buckets), reducer.trial.over
        assert reducer.buckets[0].algorithm.boundaries is None
        return before, after, np.array_equal(held, reducer.read_residual())

    assert on_ranks(1, program) == [((True, 2, True), (False, 1, False), True)]


def test_messages_of_the_trial_are_counted_as_such():
    def program(transport):
        reducer, phases = make(transport, options=AUTO), []
        for step in range(3 * STEPS):
            take_step(reducer, gradient(step, transport.rank))
            agreed = reducer.report.phases["agree"].messages_sent
            reducer.learn(Sample(np.array([1.0, 0.0]), 1.0, 1.0 / len(reducer.buckets)))
            assert reducer.report.phases["agree"].messages_sent == agreed
            phases.append(reducer.report.phases.get("trial"))
        return [index for index, phase in enumerate(phases) if phase is not None and phase.messages_sent], phases[-1]

    assert on_ranks(2, program) == [([2 * STEPS - 1], None)] * 2

"""Buckets of gradients on ranks that are threads: how they are cut, and that they are undone together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk import OkTopk, OptionError, TransportError
from horovod_oktopk.reducer.buckets import split
from horovod_oktopk.reducer.layout import Layout
from tests.reducer.test_flat import ENTRIES, N, make, on_ranks, take_step, take_steps

GROUPED = OkTopk(density=0.1, bucket_bytes=1)


def layout_of(*lengths: int, dtype: str = "float32") -> Layout:
    return Layout([(f"p{index}", (length,), dtype) for index, length in enumerate(lengths)])


@pytest.mark.parametrize(("lengths", "order", "bucket_bytes", "expected"), [
    ([5, 5, 5], [2, 1, 0], None, [(0, 1, 2)]),
    ([5, 5, 5], [2, 1, 0], 1, [(2,), (1,), (0,)]),
    ([5, 5, 5], [2, 1, 0], 20, [(2,), (1,), (0,)]),
    ([5, 5, 5], [2, 1, 0], 21, [(1, 2), (0,)]),
    ([5, 5, 5], [1, 0, 2], 40, [(0, 1), (2,)]),
    ([5, 5, 5], [2, 1, 0], 1000, [(0, 1, 2)]),
    ([100, 1, 1], [2, 1, 0], 12, [(0, 1, 2)]),
    ([0, 5, 0], [2, 1, 0], 1, [(1, 2), (0,)]),
    ([], [], 1, [()]), ([], [], None, [()])])
def test_a_group_is_closed_by_the_gradient_that_fills_it(lengths, order, bucket_bytes, expected):
    assert split(layout_of(*lengths), order, bucket_bytes) == expected


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 300), st.randoms(use_true_random=False))
def test_groups_hold_every_gradient_once_in_the_order_of_readiness(lengths, bucket_bytes, random):
    order = random.sample(range(len(lengths)), len(lengths))
    buckets = split(layout_of(*lengths), order, bucket_bytes)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
    places = [sorted(order.index(member) for member in bucket) for bucket in buckets]
    assert [place for bucket in places for place in bucket] == list(range(len(lengths)))
    assert all(4 * sum(lengths[i] for i in bucket) >= bucket_bytes for bucket in buckets[:-1])


def test_half_precision_counts_as_what_the_residual_is_kept_in():
    assert split(layout_of(5, 5, dtype="float16"), [1, 0], 20) == [(1,), (0,)]


def test_k_cannot_be_given_for_groups():
    with pytest.raises(OptionError, match="give a density; got k=3, bucket_bytes=1"):
        OkTopk(k=3, bucket_bytes=1)
    for wrong in (0, 1.5, True, "1"):
        with pytest.raises(OptionError, match="bucket_bytes must be an integer of at least 1"):
            OkTopk(bucket_bytes=wrong)


@pytest.mark.parametrize("where", [0, N - 1])
def test_nan_in_either_group_changes_no_residual(where):
    def program(transport):
        reducer = make(transport, options=replace(GROUPED, global_density=0.2))
        take_steps(reducer, transport.rank, range(3))
        before, state, gradient = reducer.read_residual(), reducer.buckets.state(), np.ones(N, np.float32)
        gradient[where] = np.nan if transport.rank == 1 else 1.0
        update = take_step(reducer, gradient)
        same = reducer.read_residual().tobytes() == before.tobytes()
        undone = update is None and not reducer.report.finite and same and reducer.buckets.state() == state
        assert (reducer.report.n, reducer.report.k, reducer.report.global_k) == (N, 11, 21)
        return undone, take_step(reducer, np.ones(N, np.float32)) is not None

    assert on_ranks(3, program) == [(True, True)] * 3


def test_after_a_group_that_failed_the_rest_of_the_step_is_skipped(monkeypatch):
    def program(transport):
        reducer = make(transport, options=GROUPED)
        take_steps(reducer, transport.rank, range(2))
        before, reduced = reducer.read_residual(), []
        first, second = (bucket.algorithm for bucket in reducer.buckets)
        monkeypatch.setattr(first, "reduce", lambda *_, **__: (_ for _ in ()).throw(TransportError("cut off")))
        monkeypatch.setattr(second, "reduce", lambda *_, **__: reduced.append(1))
        with pytest.raises(TransportError, match="cut off"):
            reducer.reduce(0, [(0, np.ones(3, np.float32))])
        reducer.reduce(1, [(0, np.ones(100, np.float32))])
        monkeypatch.undo()
        unchanged = reducer.read_residual().tobytes() == before.tobytes()
        return reduced, unchanged, take_step(reducer, np.ones(N, np.float32)) is not None

    assert on_ranks(1, program) == [([], True, True)]


def test_other_groups_hold_the_same_residual_bit_for_bit():
    entries = [*ENTRIES, ("c", (40,), "float64")]

    def program(transport):
        first = make(transport, entries, OkTopk(density=0.1))
        take_step(first, np.random.default_rng(3).standard_normal(N + 40))
        held = first.read_residual()
        for bucket_bytes in (1, 100, None):
            other = make(transport, entries, replace(GROUPED, bucket_bytes=bucket_bytes))
            other.load([first.record()])
            assert (other.buckets.state() == first.buckets.state()) == (bucket_bytes is None)
            assert other.read_residual().tobytes() == held.tobytes()
        return bool(held.any())

    assert on_ranks(1, program) == [True]


def test_gradients_without_elements_are_a_group_like_any():
    def program(transport):
        reducer = make(transport, [("empty", (0,), "float32"), *ENTRIES], GROUPED)
        assert [bucket.layout.n for bucket in reducer.buckets] == [3, 100, 0]
        return len(take_step(reducer, np.ones(N, np.float32)))

    assert on_ranks(2, program) == [N, N]


def test_a_step_that_was_begun_and_not_finished_leaves_no_trace():
    def program(transport):
        reducers = [make(transport, options=GROUPED), make(transport, options=GROUPED)]
        for reducer in reducers:
            take_steps(reducer, transport.rank, range(3))
        before = reducers[0].buckets.state()
        reducers[0].reduce(0, [(0, np.ones(3, np.float32))])
        recorded = reducers[0].record()["algorithm"]
        updates = [take_step(reducer, np.ones(N, np.float32)) for reducer in reducers]
        states = [reducer.buckets.state() for reducer in reducers]
        return recorded == before, np.array_equal(*updates), states[0] == states[1], states[0]["step"]

    assert on_ranks(2, program) == [(True, True, True, 4)] * 2


def test_after_a_group_that_is_not_finite_the_rest_of_the_step_is_skipped(monkeypatch):
    def program(transport):
        reducer, reduced = make(transport, options=GROUPED), []
        monkeypatch.setattr(reducer.buckets[1].algorithm, "reduce", lambda *_, **__: reduced.append(1))
        gradient = np.ones(N, np.float32)
        gradient[-1] = np.nan
        return take_step(reducer, gradient), reduced

    assert on_ranks(1, program) == [(None, [])]


def test_a_report_adds_its_groups_up():
    def program(transport):
        whole, alone = make(transport, options=GROUPED), make(transport, [ENTRIES[1]], OkTopk(density=0.1))
        gradient = np.arange(1, N + 1, dtype=np.float32)
        take_step(whole, gradient)
        take_step(alone, gradient[-3:])
        report = whole.report
        assert report.phases["agree"].bytes_sent == 2 * alone.report.phases["agree"].bytes_sent
        assert (report.n, report.k, report.global_k) == (N, 11, 11)
        assert (report.local_selected, report.global_selected) == (11, 11)
        assert report.local_threshold == alone.report.local_threshold == gradient[-1]  # the larger of the buckets'
        before = report.phases["write_back"].seconds
        with whole.writing():
            pass
        return report.phases["write_back"].seconds > before

    assert on_ranks(2, program) == [True] * 2

"""GradientMode and its checkpoints on ranks that are threads: what needs no framework."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from horovod_oktopk import AgreementError, OkTopk, OptionError, PluginError, TransportError
from horovod_oktopk.modes.gradient_mode import GradientMode
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.state import gather
from horovod_oktopk.vectors.layout import Layout
from tests.support.flat_gradients import FlatGradients
from tests.support.ranks import ThreadRanks
from tests.support.threads import ThreadTransport
from tests.support.threads import run_ranks as on_ranks

N = 103
ENTRIES = [("a", (50, 2), "float32"), ("b", (3,), "float32")]
OPTIONS = OkTopk(density=0.1, threshold_interval=4, region_interval=5)


def make(transport: ThreadTransport, entries: Any = ENTRIES, options: OkTopk = OPTIONS, average: bool = False,
         **arguments: Any) -> GradientMode:
    layout = Layout(entries)
    return GradientMode(options, average, layout, lambda: NumpyAccumulator(layout.n, layout.dtype),
                       ThreadRanks(transport), **arguments)


def take_step(reducer: GradientMode, gradient: np.ndarray) -> np.ndarray | None:
    """Return the update as a dense vector; None if the step was undone."""
    offsets = reducer.reduction.layout.offsets
    parts = [gradient[start:stop] for start, stop in pairwise(offsets)]
    gradients = FlatGradients(gradient, list(zip(offsets[:-1].tolist(), parts, strict=True)))
    reducer.reduce(gradients)
    return gradients.dense_update()


def take_steps(reducer: GradientMode, rank: int, steps: range) -> np.ndarray:
    """Return the sum of the updates."""
    total = np.zeros(reducer.reduction.layout.n, np.float32)
    for step in steps:
        gradient = np.random.default_rng((step, rank)).standard_normal(reducer.reduction.layout.n, np.float32)
        total += take_step(reducer, gradient)
    return total


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_file_gives_every_rank_its_state_back_also_in_small_messages(size, tmp_path, monkeypatch):
    monkeypatch.setattr(gather, "CHUNK", 64)

    def program(transport):
        reducer = make(transport)
        take_steps(reducer, transport.rank, range(6))
        gather.save([reducer], tmp_path / "state", epoch=3)
        expected = take_steps(reducer, transport.rank, range(6, 12)), reducer.read_residual()
        resumed = make(transport)
        gather.load(resumed, 0, tmp_path / "state")
        found = take_steps(resumed, transport.rank, range(6, 12)), resumed.read_residual()
        return all(a.tobytes() == b.tobytes() for a, b in zip(expected, found, strict=True)), resumed.report.step

    assert on_ranks(size, program) == [(True, 12)] * size
    assert gather.read_marks(tmp_path / "state") == {"epoch": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("damage", ["missing", "not a zip", "cut"])
def test_a_file_that_does_not_fit_is_an_error_on_all_ranks(damage, tmp_path):
    path = tmp_path / "state"

    def save(transport):
        reducer = make(transport)
        take_steps(reducer, transport.rank, range(2))
        gather.save([reducer], path)

    on_ranks(3, save)
    if damage == "missing":
        path.unlink()
    elif damage == "not a zip":
        path.write_bytes(b"something else")
    else:
        path.write_bytes(path.read_bytes()[:200])

    def load(transport):
        reducer = make(transport)
        with pytest.raises(OptionError, match="no state for these parameters could be loaded"):
            gather.load(reducer, 0, path)
        return take_steps(reducer, transport.rank, range(1)) is not None  # nobody is left waiting

    assert on_ranks(3, load) == [True] * 3


def test_a_state_that_one_rank_alone_loads_is_an_error_on_all(tmp_path):
    def program(transport):
        reducer = make(transport)
        take_steps(reducer, transport.rank, range(1))
        gather.save([reducer], tmp_path / "state")
        action = partial(gather.load, reducer, 0, tmp_path / "state")
        if transport.rank != 1:
            action = partial(take_steps, reducer, transport.rank, range(1))
        with pytest.raises(AgreementError, match="take a step, ranks .1. load the state"):
            action()

    on_ranks(3, program)


@pytest.mark.parametrize(("refusing", "error", "words"), [
    ([2], AgreementError, "parameter a: no gradient"), ([0, 1, 2], PluginError, "not so")])
def test_a_step_that_one_rank_or_all_cannot_take_is_an_error_on_all_ranks(refusing, error, words):
    def program(transport):
        reducer = make(transport)
        take_steps(reducer, transport.rank, range(1))
        action = partial(take_steps, reducer, transport.rank, range(1))
        if transport.rank in refusing:
            action = partial(reducer.refuse_step, "not so", ["parameter a: no gradient"])
        with pytest.raises(error, match=words):
            action()

    on_ranks(3, program)


def test_no_gradient_at_all_still_meets_the_others():
    def program(transport):
        reducer = make(transport, [] if transport.rank == 1 else ENTRIES)
        with pytest.raises(AgreementError, match="parameter a"):
            take_steps(reducer, transport.rank, range(1))

    on_ranks(2, program)
    assert on_ranks(2, lambda transport: len(take_step(make(transport, []), np.empty(0)))) == [0, 0]


def test_a_step_that_failed_leaves_no_trace(monkeypatch):
    def program(transport):
        reducers = [make(transport), make(transport)]
        for reducer in reducers:
            take_steps(reducer, transport.rank, range(3))
        before, algorithm = reducers[0].reduction.memory.record(), reducers[0].reduction.worker.algorithm

        def fail(*_: Any, **__: Any) -> None:
            raise TransportError("cut off")

        with monkeypatch.context() as patch:
            patch.setattr(algorithm, "exchange", fail)
            with pytest.raises(TransportError, match="cut off"):
                take_step(reducers[0], np.ones(N, np.float32))
        recorded = reducers[0].records()[0]["algorithm"]
        updates = [take_step(reducer, np.ones(N, np.float32)) for reducer in reducers]
        return recorded == before, np.array_equal(*updates), reducers[0].reduction.memory.step

    assert on_ranks(2, program) == [(True, True, 4)] * 2


def test_sums_that_do_not_fit_their_dtype_are_told_once_and_nothing_is_lost(caplog):
    """Add sums in float32 that do not fit float16, though each rank's gradient does."""
    def program(transport):
        reducer = make(transport, [("a", (N,), "float16")])
        before = None
        for _ in range(3):
            before = reducer.read_residual()
            assert take_step(reducer, np.full(N, 40_000, np.float16)) is None
        assert not reducer.report.finite
        assert np.array_equal(reducer.read_residual(), before)
        return float(np.abs(take_step(reducer, np.full(N, 1000, np.float16))).max())

    assert on_ranks(2, program) == [2000.0] * 2
    assert caplog.text.count("too large for their dtype") == 1


@pytest.mark.parametrize(("entries", "message"), [
    ([("a", (2,), "int32")], "'a' must be one of"), ([("a", (2, 1 << 31), "float32")], "at most")])
def test_a_layout_refuses_what_it_cannot_hold(entries, message):
    with pytest.raises(OptionError, match=message):
        Layout(entries)


def test_a_layout_cuts_an_update_into_parts():
    from horovod_oktopk.vectors.sparse import SparseVector
    layout = Layout([("a", (2, 2), "float32"), ("empty", (0,), "float32"), ("b", (3,), "float64")])
    assert (layout.n, layout.dtype) == (7, np.float64)
    parts = list(layout.parts(SparseVector(np.array([1, 3, 4, 6]), np.arange(4.0))))
    assert [part.indices.tolist() for part in parts] == [[1, 3], [], [0, 2]]
    assert [part.values.tolist() for part in parts] == [[0.0, 1.0], [], [2.0, 3.0]]


def test_where_elastic_training_begins_anew_what_depends_on_the_ranks_is_forgotten():
    def program(transport):
        reducer = make(transport)
        take_steps(reducer, transport.rank, range(2))
        held = reducer.read_residual()
        reducer.reduction.reset_if_membership_changed()
        before = reducer.reduction.memory.boundaries
        reducer.reduction.ranks.resets = 1  # with the same rank and size
        reducer.reduction.reset_if_membership_changed()
        after = reducer.reduction.memory.boundaries
        take_steps(reducer, transport.rank, range(1))
        return before is not None, after is None, bool(held.any()), reducer.report.step

    assert on_ranks(2, program) == [(True, True, True, 3)] * 2


@pytest.mark.parametrize(("others", "warning"), [
    ([("b", (50, 2), "float32"), ("a", (3,), "float32")], None),
    ([("c", (3,), "float32"), ("a", (50, 2), "float32")], None),
    ([("b", (3,), "float32"), ("a", (50, 2), "float32")], "matched by name"),
    ([("x", (50, 2), "float32"), ("b", (3,), "float32")], "matched by their order"),
])
def test_residuals_go_to_the_parameters_of_their_names(others, warning, tmp_path):
    def before(transport):
        reducer = make(transport)
        take_steps(reducer, transport.rank, range(3))
        gather.save([reducer], tmp_path / "state")
        return reducer.read_residual()

    def after(transport):
        reducer = make(transport, others)
        if warning is None:
            with pytest.raises(OptionError, match="other parameters"):
                gather.load(reducer, 0, tmp_path / "state")
            return None
        gather.load(reducer, 0, tmp_path / "state")
        return reducer.read_residual()

    saved = on_ranks(2, before)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = on_ranks(2, after)
    assert warning is None or any(warning in str(w.message) for w in caught)
    for old, new in zip(saved, found, strict=True):
        if warning == "matched by name":
            assert np.array_equal(new, np.concatenate([old[100:], old[:100]]))
        elif warning is not None:
            assert np.array_equal(new, old)


def test_what_follows_a_step_is_not_in_its_report():
    def program(transport):
        reducer = make(transport)
        take_step(reducer, np.arange(N, dtype=np.float32))
        before = {name: replace(traffic) for name, traffic in reducer.report.phases.items()}
        reducer.reduction.check_agreement(reducer.reduction.description)
        return "write_back" in before, before == reducer.report.phases

    assert on_ranks(2, program) == [(True, True)] * 2

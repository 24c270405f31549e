"""The gain: how noisy gradients are is measured, told, remembered; and what follows from it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk import AgreementError, OkTopk, SameBlocks, StepAhead
from horovod_oktopk.modes.gradients import LocalGradients
from horovod_oktopk.modes.step_ahead.mode import StepAheadMode
from horovod_oktopk.modes.step_ahead.pace import (
    BLOCKS,
    DUAL_AVERAGERS,
    SUMS,
    GradientNoise,
    elements_of_rows,
    is_one_of,
    normalizes,
    sample,
)
from horovod_oktopk.phases.agreement import FEW_RANKS, Attendance, roll_call
from horovod_oktopk.vectors.wire import BLOCK
from tests.support.flat_gradients import FlatGradients
from tests.support.threads import run_ranks

from .test_mode import Worker

N = 2000
OPTIONS = StepAhead(OkTopk(density=0.05))


class Quadratic(Worker):
    """A rank that minimizes |p|²/2, with noise of its own in the gradient. scale: of the noise, per element."""

    def __init__(self, transport: Any, noise: float, options: StepAhead = OPTIONS, normalizes: bool = True) -> None:
        entries = [("a", (40, 25), "float32"), ("b", (N - 1000,), "float32")]
        super().__init__(transport, options, entries=entries, normalizes=normalizes)
        self.parameters = [np.ones(1000, np.float32), -np.ones(N - 1000, np.float32)]
        own = 0 if transport is None else transport.rank // int(options.scheme.hierarchical or 1)
        self._random, self._noise = np.random.default_rng(own), noise

    def step(self, spoilt: bool = False) -> None:
        """Take a step of which the mean gradient is 1 or -1, plus noise: the parameters hardly move."""
        noise = self._noise * self._random.standard_normal(N)
        gradient = np.sign(self.p) + noise
        if spoilt:
            gradient[0] = np.nan
        for _ in range(self.reducer.begin(FlatGradients(gradient))):
            for offset, own in zip((0, 1000), self.parameters, strict=True):
                own -= (1e-4 * self.reducer.coefficient * gradient[offset:offset + len(own)]).astype(np.float32)
        self.reducer.end()


def measure(size: int, noise: float, steps: int = 200, **arguments: Any) -> list[StepAheadMode]:
    def program(transport: Any) -> Any:
        rank = Quadratic(transport, noise, **arguments)
        for _ in range(steps):
            rank.step()
        rank.reducer.catch_up()
        return rank.reducer

    return run_ranks(size, program)


# What is measured.

@pytest.mark.parametrize(("size", "noise"), [(4, 1.0), (3, 10.0), (2, 0.3), pytest.param(
    8, 3.0, marks=pytest.mark.slow), pytest.param(FEW_RANKS + 1, 5.0, marks=pytest.mark.slow)])
def test_the_ratio_is_that_of_a_quadratic_with_known_noise(size, noise):
    """E[g²] = 1 + σ² in every element of a gradient, and 1 + σ²/P in those of the mean gradient."""
    reducers = measure(size, noise)
    expected = (1 + noise ** 2) / (1 + noise ** 2 / size)
    for reducer in reducers:
        report = reducer.report
        assert report.noise_ratio == pytest.approx(expected, rel=0.15)
        assert report.gain == reducer.gain == np.sqrt(report.noise_ratio)
        assert report.gain == reducers[0].report.gain, "the same bits on all ranks"
        figures = report.scalars()
        for name in ("gain", "noise_ratio", "noise_scale"):
            assert figures[f"oktopk/{name}"] == getattr(report, name)
        if expected < 0.9 * size:  # near it the scale is the inverse of what is hardly there
            assert report.noise_scale == pytest.approx(noise ** 2 / size, rel=0.5)


@pytest.mark.parametrize("normalizes_", [True, False])
def test_blocks_count_alike_only_if_the_optimizer_moves_them_equally_far(normalizes_):
    """Three quarters of the blocks are all noise, and a hundredth as large as those that have hardly any."""
    size, rare = 4, np.arange(N) // BLOCK % 4 == 0
    scale = np.where(rare, 100, 1)

    class Uneven(Quadratic):
        def step(self, spoilt: bool = False) -> None:
            gradient = scale * (rare + np.where(rare, 0.01, 1) * self._random.standard_normal(N))
            self.reducer.begin(FlatGradients(gradient))
            self.reducer.end()

    def program(transport: Any) -> float:
        rank = Uneven(transport, 0.0, normalizes=normalizes_)
        for _ in range(200):
            rank.step()
        rank.reducer.catch_up()
        return rank.reducer.report.noise_ratio

    expected = 1 / (rare.mean() + (1 - rare.mean()) / size) if normalizes_ else 1.0
    assert run_ranks(size, program) == pytest.approx([expected] * size, rel=0.1)


def test_without_noise_nothing_is_longer():
    for reducer in measure(3, 0.0, steps=20):
        assert reducer.gain == reducer.report.noise_ratio == 1.0
        assert reducer.report.noise_scale == 0.0


def test_noise_alone_gives_at_most_the_root_of_the_ranks():
    for reducer in measure(3, 1e4, steps=60):
        assert np.sqrt(2.4) < reducer.gain <= np.sqrt(3)


def test_alone_there_is_nothing_to_compare_with():
    reducer, = measure(1, 1.0, steps=5)
    assert reducer.gain == 1.0
    assert np.isnan(reducer.report.noise_scale)
    assert "oktopk/gain" not in reducer.report.scalars()


def test_ranks_of_a_host_have_one_gradient():
    """Four ranks on two hosts: the ratio is that of two workers."""
    options = StepAhead(replace(OkTopk(density=0.05), hierarchical=2))
    for reducer in measure(4, 30.0, options=options):
        assert reducer.report.noise_ratio == pytest.approx(2, rel=0.15)
        assert reducer.report.noise_scale > 3, "of two, not of four"


def test_a_step_in_which_a_rank_has_no_gradient_is_left_out_on_all():
    def program(transport: Any) -> float:
        rank, told = Quadratic(transport, 1.0), []
        for step in range(8):
            rank.step(spoilt=step > 3 and transport.rank == 1)
            rank.reducer.catch_up()
            told.append(rank.reducer.gain)
        return told

    first, second = run_ranks(2, program)
    assert first == second
    assert len(set(first[:4])) == 4, "every step measures"
    assert set(first[4:]) == {first[3]}


def test_only_steps_that_are_exchanged_are_looked_at(monkeypatch):
    calls, elements = [], FlatGradients.elements
    monkeypatch.setattr(FlatGradients, "elements", lambda self, places: (calls.append(1), elements(self, places))[1])

    def program(transport: Any) -> None:
        rank = Quadratic(transport, 1.0, replace(OPTIONS, local_steps=3))
        for _ in range(6):
            rank.step()

    run_ranks(2, program)
    assert len(calls) == 2 * 2


# What follows from it.


@pytest.mark.parametrize(("gain", "normalizes_", "expected", "told"), [
    ("auto", True, None, "measured"), ("auto", False, 1.0, "1"), (None, True, 1.0, "1"), (2.5, True, 2.5, "2.5"),
    (2.5, False, 2.5, "2.5")])
def test_the_gain_is_what_the_options_say_and_the_log_says_which(gain, normalizes_, expected, told, caplog):
    caplog.set_level("INFO", "horovod_oktopk")
    reducer = measure(2, 1.0, steps=3, options=replace(OPTIONS, gain=gain), normalizes=normalizes_)[0]
    assert reducer.gain == reducer.report.gain == (expected or np.sqrt(reducer.report.noise_ratio))
    assert reducer.report.noise_ratio > 1, "it is measured all the same"
    assert any(message.startswith(f"StepAhead(OkTopk), gain {told}: n = 2,000") for message in caplog.messages)


def test_ranks_whose_optimizers_differ_all_learn_it():
    def program(transport: Any) -> None:
        rank = Quadratic(transport, 1.0, normalizes=transport.rank == 0)
        with pytest.raises(AgreementError, match="normalizes its gradients: True.*normalizes its gradients: False"):
            rank.step()

    run_ranks(2, program)


def test_an_optimizer_is_known_by_its_class_or_by_what_it_says():
    class Adam:
        pass

    class Special(Adam):
        pass

    class Plain:
        pass

    class Own(Plain):
        normalizes_gradients = True

    class Linear(Adam):
        normalizes_gradients = False

    assert [normalizes(each) for each in (Adam, Special, Plain, Own, Linear)] == [True, True, False, True, False]


@pytest.mark.parametrize("name", ["AdamW", "Nadam", "NAdam", "RAdam", "Adamax", "SparseAdam", "PagedAdamW8bit",
                                  "Lion32bit", "AdamWFp8", "FusedAdam", "DeepSpeedCPUAdam", "LAMB8bit", "SophiaG"])
def test_versions_of_a_known_optimizer_are_known(name: str) -> None:
    assert normalizes(type(name, (), {}))


@pytest.mark.parametrize("name", ["SGD", "SGD8bit", "MADGRAD", "DAdaptAdam", "AdamantSGD", "SGDWithAdamWarmup"])
def test_a_name_that_only_looks_alike_is_not_taken(name: str) -> None:
    assert not normalizes(type(name, (), {}))


@pytest.mark.parametrize("name", ["Ftrl", "FTRL", "MADGRAD", "DAdaptSGD", "DAdaptAdaGrad"])
def test_what_sets_parameters_from_sums_is_known(name: str) -> None:
    assert is_one_of(DUAL_AVERAGERS, type("Mine", (type(name, (), {}),), {}))
    assert not is_one_of(DUAL_AVERAGERS, type(f"{name}Like", (), {}))


# What is remembered.

def test_a_rank_that_joins_takes_the_first_ones_means():
    def program(transport: Any) -> list[float]:
        noise = GradientNoise(3, 2.0, 1.0) if transport.rank == 0 else GradientNoise()
        noise.become_alike(transport, 3)
        joined = noise.ratio
        noise.become_alike(transport, 2)
        return [joined, noise.ratio]

    assert run_ranks(3, program) == [[2.0, 1.0]] * 3


def test_on_another_number_of_ranks_it_is_measured_anew():
    def program(transport: Any) -> Any:
        noise = GradientNoise(4, 3.0, 1.0)
        assert noise.ratio == 3.0
        noise.become_alike(transport, 2)
        sample = np.full(SUMS, 1 - 2 * transport.rank, np.float32)
        measured = roll_call(Attendance("", 1, 0, sample=sample), transport).measured
        assert measured is not None
        noise.note(measured)
        return noise.ratio, noise.scale

    assert run_ranks(2, program) == [(2.0, np.inf)] * 2, "the ranks cancel: nothing but noise"


@pytest.mark.parametrize("size", [2, pytest.param(FEW_RANKS + 1, marks=pytest.mark.slow)])
def test_all_ranks_are_told_the_same_sums(size):
    def program(transport: Any) -> Any:
        mine = np.random.default_rng(transport.rank).standard_normal(SUMS).astype(np.float32)
        return mine, roll_call(Attendance("", 1, 0, sample=mine), transport).measured

    found = run_ranks(size, program)
    samples = np.stack([mine for mine, _ in found]).astype(np.float64)
    for _, measured in found:
        assert measured.size == size
        assert np.allclose(measured.total, samples.sum(axis=0))
        assert measured.squares == pytest.approx((samples ** 2).sum())
        assert measured.total.tobytes() == found[0][1].total.tobytes()


# How gradients are read.

@pytest.mark.parametrize("n", [1, BLOCK - 3, 500])
def test_a_sum_squared_is_on_average_the_squares_of_what_was_added(n):
    """The last block of 500 elements is short, and its last element comes several times."""
    gradient = np.random.default_rng(5).standard_normal(n) ** 3

    def gather(places: np.ndarray) -> np.ndarray:
        assert (np.diff(places) >= 0).all()
        return gradient[places]

    blocks = gradient[np.arange(-(-n // BLOCK) * BLOCK).clip(max=n - 1)].reshape(-1, BLOCK)
    for alike, expected in ((True, 1), (False, np.square(blocks).sum(axis=1).mean())):
        sums = np.stack([sample(gather, n, step, alike) for step in range(2000)])
        assert sums.shape == (2000, SUMS)
        assert sums.dtype == np.float32
        assert np.square(sums, dtype=np.float64).mean() == pytest.approx(BLOCKS / SUMS * expected, rel=0.1)


def test_a_block_without_gradients_has_no_weight():
    assert sample(lambda places: np.zeros(len(places)), 200, 3, alike=True).tolist() == [0] * SUMS


@given(rows=st.lists(st.integers(0, 9), max_size=12), seed=st.integers(0, 99))
def test_elements_of_a_sparse_gradient_are_those_of_the_dense_one(rows, seed):
    random = np.random.default_rng(seed)
    values, wanted = random.standard_normal((len(rows), 3, 2)), np.sort(random.integers(60, size=20))
    dense = np.zeros((10, 3, 2))
    np.add.at(dense, np.array(rows, np.int64), values)
    found = elements_of_rows(np.array(rows, np.int64), values, wanted)
    assert np.allclose(found, dense.ravel()[wanted])


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_elements_are_gathered_from_the_part_that_has_them(lengths, seed):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    wanted = np.sort(np.random.default_rng(seed).integers(max(offsets[-1], 1), size=9))[:9 * offsets[-1]]
    mine = SimpleNamespace(layout=SimpleNamespace(offsets=offsets), elements_of=lambda part, at: offsets[part] + at)
    assert LocalGradients.elements(mine, wanted).tolist() == wanted.tolist()


@pytest.mark.parametrize(("scheme", "size", "ahead", "expected"), [
    *((OkTopk(), *case) for case in ((1, None, (1.0, 1.0)), (4, None, (0.5, 0.5 ** 0.5)), (16, None, (0.25, 0.5)))),
    *((SameBlocks(), *case) for case in ((1, None, (1.0, 1.0)), (8, None, (1.0, 1.0)), (32, None, (0.5, 0.5)))),
    *((scheme, 16, 0.3, (0.3, 0.3)) for scheme in (OkTopk(), SameBlocks()))])
def test_how_far_ahead_depends_on_scheme_workers_and_optimizer(scheme, size, ahead, expected):
    options = StepAhead(scheme, ahead=ahead)
    assert tuple(options.coefficient(size, normalizes) for normalizes in (True, False)) == pytest.approx(expected)


@pytest.mark.parametrize(("scheme", "ahead", "expected"), [
    (SameBlocks(), None, 1.0), (SameBlocks(), 0.3, 0.3), (OkTopk(), None, 0.25)])
def test_without_overlap_the_coefficient_of_the_same_blocks_is_1_on_many_workers(scheme, ahead, expected):
    assert StepAhead(scheme, ahead=ahead, overlap=False).coefficient(16, True) == pytest.approx(expected)


def test_a_run_that_is_resumed_with_fewer_local_steps_exchanges_at_once():
    def program(transport: Any) -> bool:
        before = Quadratic(transport, 1.0, replace(OPTIONS, local_steps=4))
        for _ in range(3):
            before.step()
        state = before.reducer.records()[0]
        resumed = Quadratic(transport, 1.0, replace(OPTIONS, local_steps=2, overlap=False))
        resumed.reducer.load([state])
        resumed.step()
        return resumed.reducer.report is not None

    assert all(run_ranks(2, program))

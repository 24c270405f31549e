"""The local top-k is exact, whatever a sample says."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_oktopk.kernels import NATIVE, NumpyKernels
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.selection.local_top_k import (
    MIN_SAMPLE,
    MIN_STRIDE,
    SAMPLE_HITS,
    local_top_k,
    top_k,
)

from ..support.oracle import topk_mask

N, K = 200_000, 4000
STRIDE = min(N // MIN_SAMPLE, max(MIN_STRIDE, K // SAMPLE_HITS))


def holding(values):
    acc = NumpyAccumulator(len(values), values.dtype)
    assert acc.accumulate([(0, values)])
    return acc


NORMAL = np.random.default_rng(0).standard_normal(N)
SAMPLED = np.arange(N) % STRIDE == 0
DATA = {
    "normal": NORMAL, "float64": NORMAL ** 9, "constant": np.full(N, 3), "denormal": NORMAL * 1e-41,
    "the sample meets only the large elements": NORMAL + 100 * SAMPLED,
    "the sample meets none of the large elements": np.where(SAMPLED, 1e-6, NORMAL + 100),
    "just k": np.where(np.arange(N) < K, -1, 0), "fewer than k": np.where(NORMAL > 2.5, -2, 0),
    "many ties": np.random.default_rng(0).integers(-9, 9, N),
}


@pytest.mark.parametrize("kind", DATA)
def test_re_evaluation_is_exact_though_it_looks_at_a_sample(kind):
    assert STRIDE > 1
    values = DATA[kind].astype("float64" if kind == "float64" else "float32")
    threshold, selected = local_top_k(holding(values), K)
    assert threshold == np.sort(np.abs(values))[-K]
    assert selected.indices.tolist() == np.flatnonzero(topk_mask(values, K)).tolist()
    assert selected.values.tobytes() == values[selected.indices].tobytes()


@pytest.mark.parametrize("k", [1, 9, 10, 11, 50])
def test_re_evaluation_for_every_k_around_n(k):
    values = np.arange(-3, 7, dtype=np.float32)
    _, selected = local_top_k(holding(values), k)
    assert selected.indices.tolist() == np.flatnonzero(topk_mask(values, k)).tolist()


def test_top_k_gives_ties_to_the_lower_index():
    _, everything = local_top_k(holding(np.array([2, -1, 1, 1, -2], np.float32)), 5)
    assert top_k(everything, 3).indices.tolist() == [0, 1, 4]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 100, 20_000])
@pytest.mark.parametrize("kernels", [NumpyKernels(), NATIVE], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("kind", ["normal", "exponents", "few", "equal", "zeros", "periodic", "anti-periodic"])
def test_the_kth_magnitudes_are_those_of_a_sorted_vector(dtype, n, kind, kernels):
    rng, info = np.random.default_rng(n), np.finfo(dtype)
    sampled = np.isin(np.arange(n), np.arange(NATIVE.SAMPLE) * n // NATIVE.SAMPLE)
    values = {"normal": lambda: rng.standard_normal(n), "equal": lambda: np.full(n, -1.5),
              "zeros": lambda: -np.zeros(n),
              "periodic": lambda: np.where(sampled, 2, rng.random(n)),
              "anti-periodic": lambda: np.where(sampled, 0.5, 1 + rng.random(n)),
              "exponents": lambda: rng.choice([-1, 1], n) * np.exp2(rng.integers(info.minexp - 5, info.maxexp, n)),
              "few": lambda: rng.choice([info.max, -info.max, info.smallest_subnormal, -0.0, 1.0, -2.0], n)}[kind]()
    ordered = np.sort(np.abs(values.astype(dtype)))[::-1]
    wanted = sorted({1, n, 1 + n // 2, *rng.integers(1, n + 1, 20).tolist()})
    assert [kernels.kth_magnitude(values.astype(dtype), k) for k in wanted] == [float(ordered[k - 1]) for k in wanted]


@pytest.mark.parametrize("turn", [0.0, 0.3])
def test_the_bound_of_one_step_serves_the_next(turn, monkeypatch):
    """Gradients of batches that differ, while the residual fills and settles: nearly never is another pass needed."""
    n, k, passes = 100_000, 1000, []
    in_a_pass = NumpyAccumulator._select_in_a_pass
    monkeypatch.setattr(NumpyAccumulator, "_select_in_a_pass",
                        lambda acc, *arguments: passes.append(step) or in_a_pass(acc, *arguments))
    acc, rng = NumpyAccumulator(n), np.random.default_rng(1)
    for step in range(150):
        acc.accumulate([(0, rng.standard_normal(n).astype(np.float32) * np.float32(1 + turn * (step % 3)))])
        _, selected = local_top_k(acc, k)
        assert len(selected) == k
        acc.commit(selected.indices)
    assert len([step for step in passes if step >= 5]) <= 1

"""The kernels in C++ give NumPy's bits on every input, and both do what they say."""

from __future__ import annotations

import subprocess
import sys
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk import kernels
from horovod_oktopk.kernels import CHUNK, NATIVE, CandidateBuffer, NumpyKernels
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.selection.local_top_k import local_top_k
from tests.support.runs import runs_of

BOTH = [NumpyKernels(), NATIVE]
with_both = pytest.mark.parametrize("kernel", BOTH, ids=lambda kernel: kernel.name)
DTYPES = [np.float32, np.float64]


def nasty(rng, n, dtype, finite=False):
    """Return numbers of all sizes, zeros of both signs, denormals and extremes; infinities and NaN if wanted."""
    info = np.finfo(dtype)
    special = np.array([0.0, -0.0, info.smallest_subnormal, -info.smallest_subnormal, info.tiny, info.max, -info.max,
                        1.0, -1.0, *([] if finite else [np.inf, -np.inf, np.nan])], dtype)
    values = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(dtype)
    values[rng.random(n) < 0.3] = 0
    at = rng.random(n) < 0.3
    values[at] = rng.choice(special, int(at.sum()))
    return values


def thresholds(dtype):
    info = np.finfo(dtype)
    least = float(info.smallest_subnormal)
    return [0.0, least / 4, least, float(info.tiny), 0.5, 1.0, 3.7, float(info.max), float("inf")]


def collected(buffer):
    return buffer.count, buffer.indices[:buffer.count].tolist(), buffer.values[:buffer.count].tobytes()


def bits(values):
    """Return the bits, with one NaN for all: a step with a NaN is dropped, whichever it is."""
    return np.where(np.isnan(values), values.dtype.type(np.nan), values).tobytes()


@pytest.fixture(scope="module", params=[True, False], ids=["AVX-512", "no AVX-512"])
def instructions(request):
    """Set the instructions: those that every processor has are tested on one that has more, too."""
    before = NATIVE.use_avx512(request.param)
    yield
    NATIVE.use_avx512(before)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1), st.integers(0, 200), st.integers(0, 8), st.sampled_from([1.0, 0.5, 1 / 3, 1e30]),
       st.booleans(), st.booleans(), st.booleans(), st.integers(0, 40), st.integers(0, 3), st.integers(0, 3))
def test_adding_and_collecting_has_numpys_bits(dtype, seed, n, which, scale, finite, stream, clear, shift, before,
                                               after):
    rng = np.random.default_rng(seed)
    residual, gradient = nasty(rng, n, dtype, finite), nasty(rng, n, dtype, finite)
    first, last = ([nasty(rng, n + shift, dtype, finite)[shift:] for _ in range(count)] for count in (before, after))
    found = []
    for kernel in BOTH:
        out, buffer = np.empty(n + shift, dtype)[shift:], CandidateBuffer(2 * n, dtype)  # aligned or not
        terms = residual.copy(), gradient.copy()
        is_finite = kernel.add_and_collect(*terms, out, scale, thresholds(dtype)[which], 7, buffer, stream, clear,
                                           first, last)
        kernel.collect(out, thresholds(dtype)[which], 1000, buffer)
        found.append((is_finite, bits(out), collected(buffer)))
        assert terms[0].tobytes() == residual.tobytes()
        assert terms[1].tobytes() == (bytes(gradient.nbytes) if clear else gradient.tobytes())
    assert found[0] == found[1]
    with np.errstate(all="ignore"):
        expected = residual * dtype(scale) + reduce(np.add, [*first, gradient, *last])
    assert found[0][:2] == (bool(np.isfinite(expected).all()), bits(expected))


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1), st.integers(0, 200), st.integers(0, 8), st.booleans(), st.integers(0, 3))
def test_subtracting_and_collecting_has_numpys_bits(dtype, seed, n, which, finite, shift):
    rng = np.random.default_rng(seed)
    minuend, subtrahend = nasty(rng, n + shift, dtype, finite)[shift:], nasty(rng, n, dtype, finite)
    found = []
    for kernel in BOTH:
        buffer, terms = CandidateBuffer(n, dtype), (minuend.copy(), subtrahend.copy())
        is_finite = kernel.subtract_and_collect(*terms, thresholds(dtype)[which], 7, buffer)
        found.append((is_finite, collected(buffer)))
        assert [bits(term) for term in terms] == [bits(minuend), bits(subtrahend)]
    assert found[0] == found[1]
    with np.errstate(all="ignore"):
        difference = minuend - subtrahend
    buffer = CandidateBuffer(n, dtype)
    BOTH[0].collect(difference, thresholds(dtype)[which], 7, buffer)
    assert found[0] == (bool(np.isfinite(difference).all()), collected(buffer))


def some_indices(rng, n, most):
    """Return a few ascending indices below n; or a run of many, with none left out."""
    if rng.random() < 0.6:
        return np.unique(rng.integers(0, n, rng.integers(0, most)))
    start = rng.integers(0, n)
    return np.arange(start, min(n, start + rng.integers(0, 20_000)))


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([1, 40, 3000, 10**6, 2**32]))
def test_sums_of_parts_have_numpys_bits(dtype, seed, size, n):
    rng = np.random.default_rng(seed)
    parts = [some_indices(rng, n, 60) for _ in range(size)]
    values = [nasty(rng, len(part), dtype, finite=True) for part in parts]
    with np.errstate(all="ignore"):
        (expected, wanted), (found, came) = [kernel.sum_parts(parts, values) for kernel in BOTH]
    assert found.tolist() == expected.tolist() == sorted(set().union(*(part.tolist() for part in parts)))
    assert bits(came) == bits(wanted)
    assert (came.dtype, found.dtype) == (dtype, np.int64)


@pytest.mark.usefixtures("instructions")
@with_both
@pytest.mark.parametrize("beyond", [1, 1000])
@pytest.mark.parametrize("capacity", [*range(0, 200, 7), 30, 31, 32, CHUNK + 39])
def test_nothing_is_written_past_a_room_that_is_too_small_and_it_says_so(kernel, capacity, beyond):
    buffer = CandidateBuffer(capacity, np.float32)
    assert len(buffer.indices) == len(buffer.values) == capacity + CandidateBuffer.SLACK
    whole = [np.full(len(part) + 50, 77, part.dtype) for part in (buffer.indices, buffer.values)]
    buffer.indices, buffer.values = (part[:-50] for part in whole)
    for _ in range(2):  # the second call finds it full
        kernel.collect(np.ones(capacity + beyond, np.float32), 1.0, 0, buffer)
        assert buffer.count > buffer.capacity
        assert buffer.indices[:capacity].tolist() == [*range(capacity)]
    assert all((part[-50:] == 77).all() for part in whole)


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1), st.integers(0, 150), st.integers(0, 40), st.sampled_from([0.0, 0.02, 0.3, 1.0]))
def test_a_sparse_vector_is_written_over_whatever_was_there(dtype, seed, n, offset, density):
    rng = np.random.default_rng(seed)
    indices = np.flatnonzero(rng.random(n) < density)
    values = nasty(rng, len(indices), dtype)
    expected = np.zeros(n, dtype)
    expected[indices] = values
    for kernel in BOTH:
        whole = np.full(n + offset + 20, 77, dtype)
        kernel.scatter(whole[offset:offset + n], indices, values)
        assert whole[offset:offset + n].tobytes() == expected.tobytes()
        whole[offset:offset + n] = 0
        kernel.scatter(whole[offset:offset + n], indices, values, zero=True)
        assert whole[offset:offset + n].tobytes() == expected.tobytes()
        assert (whole[:offset] == 77).all()
        assert (whole[offset + n:] == 77).all()


@with_both
@pytest.mark.parametrize("indices", [[1, 5], [-1, 2], [2, 1], [1, 1]])
def test_indices_that_do_not_fit_write_nothing(kernel, indices):
    out = np.ones(5, np.float32)
    with pytest.raises(IndexError):
        kernel.scatter(out, np.array(indices), np.zeros(2, np.float32))
    if {-1, 5} & {*indices}:
        with pytest.raises(IndexError):
            kernel.clear(out, np.array(indices))
        with pytest.raises(IndexError):
            kernel.add(out, np.array(indices), np.ones(2, np.float32))
    assert out.tolist() == [1] * 5


@with_both
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1), st.integers(0, 500), st.floats(0, 1))
def test_values_are_added_and_cleared_where_the_indices_say(kernel, dtype, seed, n, density):
    rng = np.random.default_rng(seed)
    out, at = nasty(rng, n, dtype, finite=True) / 2, rng.random(n) < density
    values = nasty(rng, int(at.sum()), dtype, finite=True) / 2
    expected = out.copy()
    expected[at] += values
    kernel.add(out, np.flatnonzero(at), values)
    assert out.tobytes() == expected.tobytes()
    kernel.clear(out, np.flatnonzero(at))
    assert out.tobytes() == np.where(at, dtype(0), expected).tobytes()


@with_both
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1), st.integers(0, 500), st.floats(0, 1), st.integers(0, 9))
def test_runs_are_added_and_subtracted_where_they_say(kernel, dtype, seed, n, density, first):
    rng = np.random.default_rng(seed)
    out, less = (nasty(rng, n, dtype, finite=True) / 2 for _ in range(2))
    places = np.flatnonzero(rng.random(n) < density)
    runs, values = runs_of(places).shifted(first), nasty(rng, len(places), dtype, finite=True) / 2
    found = np.empty_like(values)
    kernel.subtract_runs(out, less, runs.starts, runs.offsets, first, found)
    assert found.tobytes() == (out - less)[places].tobytes()
    expected = out.copy()
    expected[places] += values
    kernel.add_runs(out, runs.starts, runs.offsets, values, first)
    assert out.tobytes() == expected.tobytes()


@with_both
@pytest.mark.parametrize(("starts", "offsets", "error"), [
    ([1, 4], [0, 1, 3], IndexError), ([-1, 2], [0, 1, 3], IndexError), ([1, 3], [0, 1, 2], ValueError),
    ([1, 3], [0, 4, 3], ValueError), ([1, 3], [1, 2, 3], ValueError), ([1, 3], [0, 3], ValueError)])
def test_runs_that_do_not_fit_write_nothing(kernel, starts, offsets, error):
    out, values, runs = np.ones(5, np.float32), np.ones(3, np.float32), (np.array(starts), np.array(offsets))
    with pytest.raises(error):
        kernel.add_runs(out, *runs, values, 0)
    with pytest.raises(error):
        kernel.subtract_runs(out, out, *runs, 0, values)
    assert out.tolist() == [1] * 5
    assert values.tolist() == [1] * 3


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1), st.integers(0, 300), st.integers(0, 8))
def test_what_passes_is_found_and_collected_and_nothing_else_is(dtype, seed, n, which):
    rng = np.random.default_rng(seed)
    values, indices, threshold = nasty(rng, n, dtype), np.cumsum(rng.integers(1, 9, n)), thresholds(dtype)[which]
    wanted = [i for i, x in enumerate(values) if x != 0 and abs(x) >= threshold]
    for kernel in BOTH:
        buffer = CandidateBuffer(n, dtype)
        kernel.collect(values, threshold, 5, buffer)
        assert collected(buffer) == (len(wanted), [i + 5 for i in wanted], values[wanted].tobytes())
        found, kept = kernel.passing(indices, values, threshold)
        assert (found.dtype, kept.dtype) == (np.int64, dtype)
        assert found.tolist() == indices[wanted].tolist()
        assert kept.tobytes() == values[wanted].tobytes()


@with_both
@given(st.integers(0, 2**32 - 1), st.integers(0, 50), st.integers(0, 50), st.sampled_from([100, 2**18, 2**32]))
def test_positions_are_found_however_wide_the_indices_lie(kernel, seed, size, others, n):
    rng = np.random.default_rng(seed)
    mine = np.unique(rng.integers(0, n, size))
    other = np.unique(np.concatenate([rng.choice(mine, len(mine) // 2), rng.integers(0, n, others)]))
    if rng.random() < 0.3:
        mine, other = some_indices(rng, n, size + 1), some_indices(rng, n, others + 1)
    found = kernel.common_positions(mine, other)
    assert found.dtype == np.int64
    assert mine[found].tolist() == sorted({*mine.tolist()} & {*other.tolist()})


THREE, FOUR, INDICES = np.ones(3, np.float32), np.ones(4, np.float32), np.arange(4)


def add(*terms, others=()):
    NATIVE.add_and_collect(*terms, 1.0, 0.0, 0, CandidateBuffer(9, np.float32), False, False, *others)


def collect_in_too_few_indices():
    buffer = CandidateBuffer(9, np.float32)
    buffer.indices = buffer.indices[:12]
    NATIVE.collect(FOUR, 0.0, 0, buffer)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: add(THREE, FOUR, FOUR), "one length"),
    (lambda: add(FOUR, FOUR, FOUR, others=([THREE], [])), "one length"),
    (lambda: add(FOUR, FOUR, FOUR, others=([], [FOUR, THREE])), "one length"),
    (lambda: NATIVE.sum_parts([INDICES[:3]], [FOUR]), "as many indices as values"),
    (lambda: NATIVE.scatter(FOUR, INDICES, THREE), "as many indices as values"),
    (lambda: NATIVE.passing(INDICES[:3], FOUR, 0.0), "as many indices as values"),
    (lambda: NATIVE.add(FOUR, INDICES, THREE), "as many indices as values"),
    (lambda: NATIVE.subtract_runs(FOUR, THREE, INDICES[:1], INDICES[:2], 0, FOUR[:1]), "one length"),
    (lambda: NATIVE.sum_parts([], [FOUR]), "as many index parts as value parts"),
    (lambda: NATIVE.kth_magnitude(THREE, 4), "k from 1"),
    (collect_in_too_few_indices, "room"),
    (lambda: add(THREE, THREE, THREE.astype(np.float64)), "incompatible")])  # a copy would be filled in vain
def test_lengths_and_dtypes_that_do_not_fit_are_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.sampled_from(["float16", "float32"]))
def test_the_top_k_is_exact_whatever_was_expected(seed, k, half):
    """Steps whose scale jumps up and down, so that expectations are met, missed, and exceeded."""
    rng = np.random.default_rng(seed)
    n = 1000
    accs = [NumpyAccumulator(n, kernels=kernel) for kernel in BOTH]
    residual = np.zeros(n, np.float32)
    for _ in range(6):
        gradient = (nasty(rng, n, np.float32, finite=True).clip(-9, 9) * 10.0 ** rng.integers(-2, 3)).astype(half)
        residual = residual + gradient
        order = np.lexsort((np.arange(n), -np.abs(residual)))[:k]
        wanted = np.sort(order[residual[order] != 0])
        for acc in accs:
            acc.accumulate([(0, gradient[:400]), (400, gradient[400:])])
            threshold, selected = local_top_k(acc, k)
            assert selected.indices.tolist() == wanted.tolist()
            assert selected.values.tobytes() == residual[wanted].tobytes()
            assert threshold == (np.abs(residual[order]).min() if len(wanted) == k else 0.0)
            acc.commit(selected.indices)
        residual[wanted] = 0


def test_candidates_of_another_step_are_not_taken_for_this_one():
    acc = NumpyAccumulator(100)
    acc.expect_threshold(1.0, 100)
    acc.accumulate([(0, np.linspace(-3, 3, 100, dtype=np.float32))])
    acc.commit(acc.select(1.5, 100).indices)
    acc.accumulate([(50, np.full(50, 9, np.float32)), (0, np.full(50, 8, np.float32))])  # not in order
    found = acc.select(5.0, 100)
    assert found.indices.tolist() == np.flatnonzero(np.abs(acc._acc) >= 5).tolist()


def test_the_extension_is_there_and_in_use():
    assert kernels.KERNELS.name == "C++"
    assert NATIVE.SLACK == CandidateBuffer.SLACK


def test_without_the_extension_the_package_works():
    program = ("import sys; sys.modules['horovod_oktopk.kernels._native'] = None\n"
               "from horovod_oktopk.__main__ import check_kernels; print(check_kernels())")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "install a C++ compiler" in done.stdout


def test_kernels_that_were_built_and_cannot_be_loaded_say_why():
    program = """
import sys
class Broken:
    def find_spec(self, name, *_):
        if name.endswith("._native"):
            raise ImportError("undefined symbol: of_another_machine")
sys.meta_path.insert(0, Broken())
from horovod_oktopk.kernels import NATIVE
assert NATIVE is None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "were built, but cannot be loaded here (undefined symbol: of_another_machine)" in done.stderr

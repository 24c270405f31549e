"""The ranks of a host add up their gradients slice by slice, and keep a slice each."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.hosts import sums
from horovod_oktopk.hosts.hosts import Hosts
from horovod_oktopk.hosts.sums import HostAccumulator
from horovod_oktopk.selection import accumulator
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.transport.counting import CountingTransport
from tests.support.threads import ThreadTransport, ThreadWorld, run_ranks


def of_one_host(n, transport, dtype=np.float32):
    """Return the accumulator of a rank; all ranks are on one host."""
    alone = ThreadTransport(ThreadWorld(1), 0)
    hosts = Hosts(CountingTransport(transport), CountingTransport(alone))
    return HostAccumulator(n, dtype, lambda: hosts)


def in_pieces(vector, cuts):
    """Return (offset, array) pairs that cover the vector."""
    return [(start, vector[start:stop]) for start, stop in pairwise([0, *cuts, len(vector)])]


@given(size=st.integers(1, 4), n=st.integers(1, 60), cuts=st.lists(st.integers(0, 60), max_size=4),
       smallest=st.sampled_from([1, 7, 100]), chunk=st.sampled_from([2, 100]), shares=st.booleans(),
       dtype=st.sampled_from(["float16", "float32"]))
def test_a_rank_has_the_sum_of_its_slice(size, n, cuts, smallest, chunk, shares, dtype):
    gradients = np.random.default_rng(n).integers(-50, 50, (2, size, n)).astype(dtype)
    cuts = sorted(min(cut, n) for cut in cuts)

    def program(transport):
        acc, found = of_one_host(n, transport), []
        for step in gradients:
            pieces = in_pieces(step[transport.rank].copy(), cuts)
            assert acc.accumulate(pieces, clear=True)
            assert dtype != "float32" or not any(piece.any() for _, piece in pieces)
            acc.commit(np.empty(0, np.int64))
            found.append(acc.read_residual())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "SMALLEST", smallest)
        patch.setattr(accumulator, "CHUNK", chunk)
        if not shares:
            patch.setattr(sums, "shared_memory", lambda *_: None)
        by_rank = run_ranks(size, program)
    bounds = n * np.arange(size + 1) // size
    expected = np.cumsum(gradients.astype(np.float32).sum(axis=1), axis=0)
    for rank, found in enumerate(by_rank):
        for step, residual in enumerate(found):
            mine = slice(bounds[rank], bounds[rank + 1])
            assert np.array_equal(residual[mine], expected[step][mine])
            residual[mine] = 0
            assert not residual.any()


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_bits_are_those_of_a_rank_that_was_given_the_sum(shares, dtype, monkeypatch):
    """Summands are added in the order of the ranks, and their sum to the residual."""
    gradients = np.random.default_rng(1).standard_normal((2, 4, 1001)).astype(dtype)
    kept = np.float64 if dtype == "float64" else np.float32
    expected = NumpyAccumulator(1001, kept)
    for step in gradients.astype(kept):
        expected.accumulate([(0, step[0] + step[1] + step[2] + step[3])])
        expected.commit(np.empty(0, np.int64))
    monkeypatch.setattr(sums, "SMALLEST", 300)
    if not shares:
        monkeypatch.setattr(sums, "shared_memory", lambda *_: None)

    def program(transport):
        acc = of_one_host(1001, transport, kept)
        for step in gradients:
            acc.accumulate([(0, step[transport.rank])])
            acc.commit(np.empty(0, np.int64))
        return acc.read_residual()

    assert sum(run_ranks(4, program)).tobytes() == expected.residual.tobytes()


@pytest.mark.parametrize(("dtype", "cleared"), [("float32", True), ("float64", False), (">f4", False)])
def test_gradients_with_gaps_and_of_other_dtypes(dtype, cleared):
    def program(transport):
        memory = np.ones((40, 2), dtype)
        acc = of_one_host(40, transport)
        acc.accumulate([(0, memory[:, 0])], clear=True)
        acc.commit(np.empty(0, np.int64))
        assert memory[:, 1].all(), "what lies in the gaps is not the gradient's"
        assert memory[:, 0].any() != cleared
        return acc.read_residual()

    assert sum(run_ranks(3, program)).tolist() == [3] * 40


def test_what_ranks_lay_out_takes_a_quarter_of_the_memory_of_a_slice(monkeypatch):
    lengths = []
    monkeypatch.setattr(sums, "SMALLEST", 1)
    monkeypatch.setattr(sums, "shared_memory", lambda length, within: lengths.append(length))

    def program(transport):
        of_one_host(9600, transport).accumulate([(0, np.ones(9600, np.float32))])

    for size in (2, 4):
        run_ranks(size, program)
    assert lengths == [2 * 4 * 4800 // 4] * 2 + [2 * 4 * 2400 // 4] * 4


def test_a_rank_keeps_its_share_of_the_memory():
    def program(transport):
        acc = of_one_host(1000, transport)
        assert acc.n == 0
        acc.accumulate([(0, np.ones(1000, np.float32))])
        return acc.n, acc.residual.nbytes + acc._acc.nbytes

    assert run_ranks(4, program) == [(250, 2 * 4 * 250)] * 4


def test_any_residual_that_is_loaded_comes_to_the_ranks_that_keep_it():
    """Once; not if the step is undone."""
    residuals = np.random.default_rng(3).integers(-50, 50, (2, 9)).astype(np.float32)

    def program(transport):
        acc = of_one_host(9, transport)
        acc.load_residual(residuals[transport.rank])
        loaded = acc.read_residual()
        acc.accumulate([(0, np.ones(9, np.float32))])  # and not committed
        acc.accumulate([(0, np.ones(9, np.float32))])
        acc.commit(np.empty(0, np.int64))
        return loaded, acc.read_residual()

    found = run_ranks(2, program)
    assert [loaded.tolist() for loaded, _ in found] == residuals.tolist()
    assert sum(taken for _, taken in found).tolist() == (residuals.sum(axis=0) + 2).tolist()


def test_nan_on_any_rank_is_seen_by_the_rank_that_has_its_share():
    def program(transport):
        gradient = np.ones(10, np.float32)
        gradient[7] = np.nan if transport.rank == 0 else 1
        return of_one_host(10, transport).accumulate([(0, gradient)])

    assert run_ranks(2, program) == [True, False]


def test_any_number_of_infinite_elements():
    def program(transport):
        return of_one_host(5000, transport).accumulate([(0, np.full(5000, np.inf, np.float32))], clear=True)

    assert run_ranks(2, program) == [False, False]

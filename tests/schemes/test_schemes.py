"""Every scheme against its oracle, and what holds for all: conservation, equal replicas, NaN, volume, any P."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.errors import AgreementError, WireError
from horovod_oktopk.modes.gradient_mode import GradientMode
from horovod_oktopk.schemes.gaussiank import gaussian_threshold
from horovod_oktopk.schemes.gtopk import PaddedCodec, tree_distances
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.vectors.layout import Layout
from horovod_oktopk.vectors.sparse import SparseVector
from horovod_oktopk.vectors.wire import WireCodec

from ..support.flat_gradients import FlatGradients
from ..support.gradients import Case, cases, each_adversarial
from ..support.oracle import rank_order_sum, topk_mask
from ..support.ranks import ThreadRanks
from ..support.schemes import EXACT
from ..support.simulation import dense, simulate
from ..support.threads import run_ranks
from .test_conservation import assert_conserved, assert_kept, assert_replicas_agree, assert_update_is_what_was_cleared

by_name = pytest.mark.parametrize("name", EXACT)


def run(name, gradients, k):
    return simulate(gradients, k, make=EXACT[name].algorithm)


def top_k(vector, k):
    return np.where(topk_mask(vector, k), vector, 0)


def top_k_of_each(ranks, k):
    return [top_k(record.acc, k) for record in ranks]


def tree_of_merges(vectors, k):
    """Return the result of Figure 4's tree in dense NumPy; ranks without a partner go on alone."""
    level = list(vectors)
    while len(level) > 1:
        level = [top_k(sum(level[i:i + 2]), k) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]


ORACLES = {"TopkA": lambda vectors, _: rank_order_sum(vectors), "TopkDSA": lambda vectors, _: rank_order_sum(vectors),
           "naive GTopk": lambda vectors, k: top_k(rank_order_sum(vectors), k), "GTopk": tree_of_merges}
"""The update that a scheme makes of everyone's top k."""


@pytest.mark.parametrize("name", ORACLES)
@given(case=cases())
def test_u_is_the_oracles(name, case):
    for ranks in run(name, case.gradients(), case.k):
        expected = ORACLES[name](top_k_of_each(ranks, case.k), case.k)
        assert np.array_equal(dense(ranks[0].update, case.n), expected)
        for record in ranks if name in ("TopkA", "TopkDSA") else ():
            assert np.array_equal(record.contributed, np.flatnonzero(topk_mask(record.acc, case.k)))


@pytest.mark.parametrize(("name", "global_k"), [
    ("TopkA", 100), ("TopkDSA", 100), ("GaussianK", 100), ("GTopk", 20), ("naive GTopk", 20), ("OkTopk", 20)])
def test_the_report_tells_how_many_elements_of_the_sum_are_kept(name, global_k):
    case = Case("normal", 400, 20, 5, 1, seed=1)
    for record in run(name, case.gradients(), case.k)[0]:
        assert record.report.global_selected <= record.report.global_k == global_k


@pytest.mark.parametrize(("first", "second", "k", "update"), [
    ([9, 1, 0, 0], [9, 0, 0, 0], 1, [0, 30, 0, 0]), ([0, 9, 0, 10], [0, 0, 0, 10], 2, [0, 39, 0, 27])])
def test_gtopk_keeps_what_a_merge_dropped_though_another_branch_brought_it_in(first, second, k, update):
    """Algorithm 4 would clear index 1 on rank 0, whose element never reached the sum."""
    gradients = np.array([[first, second, [0, 30, 0, 0], [0, 0, 0, 7]]], np.float32)
    assert dense(run("GTopk", gradients, k)[0][0].update, 4).tolist() == update


@by_name
@given(case=cases())
def test_nothing_is_lost_nothing_counts_twice_and_replicas_agree(name, case):
    for ranks in run(name, case.gradients(), case.k):
        assert_replicas_agree(ranks)
        for record in ranks:
            assert_kept(record)
        contributions = [np.where(record.residual == record.acc, 0, record.acc) for record in ranks]
        update, cleared = dense(ranks[0].update, case.n), rank_order_sum(contributions)
        if name != "GTopk":
            assert np.array_equal(update, cleared)
        else:  # summed along the tree, not in rank order: rounded otherwise, in the last bits of what is added
            tolerance = len(ranks) * np.finfo(update.dtype).eps * np.abs(contributions).sum(axis=0)
            assert (np.abs(update - cleared) <= tolerance).all()


@by_name
@pytest.mark.parametrize("k", [40, 390])
def test_what_a_rank_contributed_is_in_the_update_though_the_sum_is_zero(name, k):
    """StepAhead takes it back there from the rank's own parameters."""
    gradient = np.random.default_rng(0).permutation(np.arange(1, 401, dtype=np.float32))
    others = np.where(gradient % 10, -gradient, gradient)
    for ranks in run(name, np.array([[gradient, others]]), k):
        for record in ranks:
            assert len(record.contributed)
            assert np.isin(record.contributed, record.update.indices).all()


@pytest.mark.parametrize("case", each_adversarial())
def test_naive_gtopk_contributes_only_what_is_in_the_sum(case):
    for ranks in run("naive GTopk", case.gradients(), case.k):
        for record in ranks:
            assert_conserved(record)
        assert_update_is_what_was_cleared(ranks)


def words(record):
    sent, received = record.report.payload_bytes()
    return sent / 4, received / 4


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_volumes_keep_to_table_1(size):
    n, k = 4000, 100
    gradients = Case("normal", n, k, size, 5, seed=2).gradients()
    for name in ("TopkA", "naive GTopk", "GaussianK"):
        for ranks in run(name, gradients, k):
            assert max(words(record)[0] for record in ranks) <= 2 * k * (size - 1)  # Table 1
    for ranks in run("TopkDSA", gradients, k):
        split = [record.report.phases["split_and_reduce"].bytes_sent / 4 for record in ranks]
        total = sum(words(record)[0] for record in ranks) / size
        assert max(split) <= 2 * k
        assert total <= (2 * k + n) * (size - 1) / size + 2 * k
    rounds = len(tree_distances(size))
    for ranks in run("GTopk", gradients, k):
        for record in ranks:
            sent, received = words(record)
            assert sent + received <= 4 * k * rounds + rounds * (2 + k / 16 + 1)


def test_topkdsa_sends_dense_regions_where_they_are_smaller():
    n, size = 400, 4
    gradients = np.random.default_rng(1).standard_normal((2, size, n)).astype(np.float32)
    for ranks in run("TopkDSA", gradients, n // 2):
        gathered = ranks[0].report.phases["allgatherv"].bytes_sent
        assert gathered <= 4 * n
        expected = rank_order_sum(top_k_of_each(ranks, n // 2))
        assert np.array_equal(dense(ranks[0].update, n), expected)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_the_gaussian_threshold_selects_about_k_of_a_normal_distribution(density):
    values = 3 * np.random.default_rng(0).standard_normal(200_000)
    share = (np.abs(values) >= gaussian_threshold(values.mean(), values.std(), density)).mean()
    assert abs(share - density) < 0.1 * density


@given(case=cases(), seed=st.integers(0, 2**16))
def test_gaussiank_selects_more_than_three_quarters_of_k_and_at_most_k(case, seed):
    for ranks in run("GaussianK", case.gradients(), case.k):
        for record in ranks:
            available = int((record.acc != 0).sum())
            k = min(case.k, case.n)
            assert min(available, 3 * k // 4) <= record.report.local_selected <= k
            chosen = np.abs(record.acc[record.contributed])
            rest = np.delete(np.abs(record.acc), record.contributed)
            assert not len(chosen) or not len(rest) or chosen.min() >= rest.max()


def test_gaussiank_selects_all_where_k_is_n():
    gradients = np.random.default_rng(0).standard_normal((1, 2, 800)).astype(np.float32)
    assert [record.report.local_selected for record in run("GaussianK", gradients, 800)[0]] == [800, 800]


@by_name
@pytest.mark.parametrize("refuses", [False, True])
def test_a_rank_that_differs_or_refuses_its_step_is_an_error_on_all(name, refuses):
    """A roll call alone meets that of a step: the others, who take theirs, hear why."""
    def program(transport):
        options, gradient = replace(EXACT[name], density=0.2), np.ones(10, np.float32)
        mode = GradientMode(options, True, Layout([("w", (10,), "float32")]), lambda: NumpyAccumulator(10),
                            ThreadRanks(transport), ["sparse: no"])
        mode.reduce(FlatGradients(gradient))
        if transport.rank == 1 and refuses:
            action = partial(mode.refuse_step, "no", ["sparse: yes"])
        else:
            said = "sparse: yes" if transport.rank == 1 else mode.reduction.description
            mode.reduction._last_description = options, said
            action = partial(mode.reduce, FlatGradients(gradient))
        with pytest.raises(AgreementError, match="sparse: yes"):
            action()

    run_ranks(3, program, timeout=20)


@pytest.mark.parametrize("count", [6, 100, 2**32 - 1])
def test_a_padded_message_that_cannot_hold_what_it_says_is_refused(count):
    codec = PaddedCodec(WireCodec(np.dtype("float32")), k=5, n=90)
    message = codec.encode(SparseVector(np.arange(5), np.ones(5, np.float32)))
    assert len(codec.decode(message)) == 5
    message[:4].view(np.uint32)[0] = count
    with pytest.raises(WireError, match=f"cannot hold {count} elements"):
        codec.decode(message)

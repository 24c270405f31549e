"""SameBlocks: no index travels, bytes do not grow with the number of ranks, and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_oktopk import SameBlocks
from horovod_oktopk.vectors.wire import BLOCK

from ..support.gradients import Case
from ..support.simulation import advance, dense, new_ranks, same_bits, simulate

N, K = 5000, 1300
UNITS = pytest.mark.parametrize("unit", ["gradients", "parameters"])


def making(unit):
    return lambda: SameBlocks().algorithm(unit)


def gradients(size, steps=8, n=N):
    return Case("normal", n, K, size, steps, seed=5).gradients()


@UNITS
@pytest.mark.parametrize("size", [1, 2, 5, 18])
def test_all_ranks_send_the_same_blocks_and_what_is_not_in_the_update_stays(unit, size):
    sent = np.zeros(N, bool)
    for ranks in simulate(gradients(size), K, make=making(unit)):
        update = ranks[0].update
        assert len(update) <= K
        assert np.unique(update.indices // BLOCK, return_counts=True)[1][:-1].tolist() == [BLOCK] * (K // BLOCK - 1)
        for record in ranks:
            assert same_bits(record.update.indices, update.indices)
            assert same_bits(record.update.values, update.values)
            assert same_bits(record.contributed, update.indices)
        acc, residual = (sum(np.float64(getattr(record, name)) for record in ranks) for name in ("acc", "residual"))
        np.testing.assert_allclose(acc, residual + dense(update, N), atol=1e-5)
        sent[update.indices] = True
    assert sent.all(), "every block has come"


@pytest.mark.parametrize(("unit", "bits"), [("gradients", 32), ("parameters", 4.25)])
@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_bytes_are_those_of_the_values_for_any_number_of_ranks(unit, bits, size):
    k = 32 * 6 * BLOCK  # equal parts for all of the sizes
    for ranks in simulate(gradients(size, steps=2, n=50_000), k, make=making(unit)):
        for record in ranks:
            assert record.report.payload_bytes() == (2 * k * bits / 8 * (size - 1) / size,) * 2


@UNITS
@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK + 1, 3 * BLOCK])
def test_of_few_elements_all_are_sent_and_ranks_may_have_no_region(unit, n):
    for ranks in simulate(gradients(5, n=n), n, make=making(unit)):
        assert ranks[0].update.indices.tolist() == list(range(n))


@UNITS
def test_ranks_of_different_turns_send_nothing_and_begin_anew_together(unit):
    ranks = new_ranks(3, N, make=making(unit))
    advance(ranks, gradients(3), K)
    ranks[1].memory = ranks[1].memory.forgotten()
    nothing, first, *_ = advance(ranks, gradients(3), K)
    for record in nothing:
        assert len(record.update) == len(record.contributed) == 0
        assert same_bits(record.residual, record.acc)
        assert record.report.payload_bytes() == (0, 0)
    for record in first:
        assert record.update.indices.tolist() == list(range(K // BLOCK * BLOCK))


@UNITS
def test_turns_of_another_vector_are_not_used(unit):
    ranks = new_ranks(2, N, make=making(unit))
    advance(ranks, gradients(2), K)
    others = new_ranks(2, 2 * N, make=making(unit))
    for rank, other in zip(ranks, others, strict=True):
        other.memory = rank.memory
    record, _ = advance(others, gradients(2, 1, 2 * N), K)[0]
    assert record.update.indices.tolist() == list(range(K // BLOCK * BLOCK))


def test_a_sum_that_overflows_is_seen_on_all_ranks():
    ranks = new_ranks(4, N, make=making("parameters"))
    gradient = gradients(4)[0]
    gradient[:, 17] = 3e38
    for record in advance(ranks, gradient[None], K)[0]:
        assert not np.isfinite(record.update.values).all()
        assert same_bits(record.update.values, ranks[0].records[0].update.values)

"""The rounds of an alltoall, for any number of ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from horovod_oktopk.transport.base import DIRECT_RANKS, alltoall_rounds


@pytest.mark.parametrize("direct_ranks", [1, DIRECT_RANKS])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 9, 12, 16, 64, 65, 100, 101, 144])
def test_every_block_comes_to_its_rank(size, direct_ranks):
    ranks = np.arange(size)
    at = np.array([[(source, (source + block) % size) for block in ranks] for source in ranks])  # (source, to)
    for messages in alltoall_rounds(size, direct_ranks):
        after = at.copy()
        for distance, moved in messages:
            after[:, moved] = np.roll(at, distance, axis=0)[:, moved]
        at = after
    assert (at[:, :, 1] == ranks[:, None]).all()
    assert all(sorted(sources) == ranks.tolist() for sources in at[:, :, 0])


def test_among_many_ranks_there_are_few_messages():
    for size in (DIRECT_RANKS, DIRECT_RANKS + 1, 1000, 1024):
        rounds = alltoall_rounds(size)
        messages = [moved for each in rounds for _, moved in each]
        if size <= DIRECT_RANKS:
            assert (len(rounds), len(messages), sum(map(len, messages))) == (1, size - 1, size - 1)
        else:
            assert len(rounds) == 2
            assert len(messages) <= 2 * math.ceil(math.sqrt(size))
            assert sum(map(len, messages)) < 2 * size

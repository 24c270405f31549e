"""Regions: owned by whoever holds most already; everyone knows what all send and receive."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk.phases.division import divide
from horovod_oktopk.phases.regions import owner_rotation
from tests.support.threads import run_ranks

from ..support.selections import region_counts, selections


@given(selections(), st.booleans())
def test_everyone_knows_what_all_send_and_receive(drawn, tells_all):
    """Ranks know this from all counts, and from those that concern them alone."""
    n, selected = drawn
    size = len(selected)
    boundaries = np.arange(size + 1) * n // size
    counts = region_counts(selected, boundaries)

    def program(transport):
        rank = transport.rank
        told = counts if tells_all else counts[:, rank:rank + 1]
        return divide(boundaries, selected[rank], told, transport)

    for rank, mine in enumerate(run_ranks(size, program)):
        assert mine.sent.tolist() == counts[rank].tolist()
        assert mine.received.tolist() == counts[:, mine.of(rank)].tolist()
        assert mine.rotation == (owner_rotation(counts) if tells_all else 0)
        home = [counts[each, mine.of(each)] for each in range(size)]
        assert mine.load_sent.tolist() == [counts[each].sum() - home[each] for each in range(size)]
        assert mine.load_received.tolist() == [counts[:, mine.of(each)].sum() - home[each] for each in range(size)]


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_the_rotation_keeps_the_most_at_home(size, seed):
    counts = np.random.default_rng(seed).integers(0, 20, (size, size))
    kept = [sum(int(counts[(j + r) % size, j]) for j in range(size)) for r in range(size)]
    assert owner_rotation(counts) == kept.index(max(kept))

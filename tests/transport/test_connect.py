"""Hosts as workers: the grid of the ranks' numbers."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_oktopk import PluginError
from horovod_oktopk.transport.connect import grid_of


@pytest.mark.parametrize(("hierarchical", "first", "expected"), [
    (True, [0, 0, 2, 2], [[0, 1], [2, 3]]), (2, [0, 0, 0, 0], [[0, 1], [2, 3]]), (True, [0, 1, 2], None)])
def test_ranks_that_follow_one_another_are_a_host(hierarchical, first, expected):
    grid = grid_of(hierarchical, np.array(first))
    assert (grid if grid is None else grid.tolist()) == expected


@pytest.mark.parametrize(("hierarchical", "first", "sizes"), [
    (True, [0, 0, 0, 3], [3, 1]), (True, [0, 1, 0, 1], [1, 1, 1, 1]), (2, [0, 0, 0], [2, 1])])
def test_other_hosts_are_refused(hierarchical, first, sizes):
    with pytest.raises(PluginError, match=rf"follow one another.* got \{sizes} ranks on the hosts"):
        grid_of(hierarchical, np.array(first))

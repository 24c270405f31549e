"""Places in runs, from a list of all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from horovod_oktopk.vectors.runs import Runs


def runs_of(places: Sequence[int]) -> Runs:
    """Return the runs of ascending places."""
    places = np.array(places, np.int64)
    first = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    return Runs(places[first], np.append(first, len(places)))

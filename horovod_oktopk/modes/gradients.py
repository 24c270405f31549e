"""This rank's gradients of one step as modes see them: those that they read, and those that they replace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import pairwise
from typing import ClassVar

import numpy as np

from ..selection.accumulator import Piece
from ..vectors.layout import Layout
from ..vectors.sparse import Indices, SparseVector, Values


class Gradients(ABC):
    """This rank's gradients of one step, as the flat vector of a layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @abstractmethod
    def all_finite(self) -> bool:
        """Return True if all elements are finite."""


class LocalGradients(Gradients):
    """Gradients that stay this rank's own, of which a mode reads a few."""

    def elements(self, places: Indices) -> Values:
        """Return the elements at these places of the flat vector: int64, ascending; a place may come twice."""
        offsets = self.layout.offsets
        cuts = np.searchsorted(places, offsets)
        found = [self.elements_of(part, places[first:last] - offsets[part])
                 for part, (first, last) in enumerate(pairwise(cuts.tolist())) if first < last]
        return np.concatenate([*found, np.empty(0)])

    @abstractmethod
    def elements_of(self, part: int, places: Indices) -> Values:
        """Return the elements at these places of the layout's part of this number."""


class ReducedGradients(Gradients):
    """Gradients that a mode replaces by what all ranks have reduced them to.

    The pieces must not be written if `clearable` is False.
    """

    clearable: ClassVar[bool] = True

    @abstractmethod
    def pieces(self) -> Iterable[Piece]:
        """Return the gradients. If they are clearable, the caller leaves zeros in a piece of the layout's dtype."""

    @abstractmethod
    def write(self, update: SparseVector | None, cleared: bool) -> None:
        """Write an update over the gradients; NaN for None. Contiguous pieces hold zeros if `cleared`."""

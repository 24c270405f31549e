"""A selection: the elements that a rank has chosen to send, with what all need to know of their magnitudes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..vectors.sparse import Indices, SparseVector, Values, sum_of


@dataclass(frozen=True)
class Selection:
    """Elements of one rank's vector, or of the sum.

    The elements have their exact values; `sent` has the values that arrive.
    The threshold is the magnitude that they pass; 0 if all non-zero elements are selected.
    The ends are the lowest and the largest magnitude that occur; the lowest is 0 if it is not known.
    """

    elements: SparseVector
    sent: SparseVector
    threshold: float
    ends: tuple[float, float]
    dense: Values | None = None
    """All values of the vector, in place of elements, where all are sent."""

    @staticmethod
    def of(elements: SparseVector, threshold: float, ends: tuple[float, float] | None = None) -> Selection:
        """Return a selection whose values are sent unchanged; the ends go from the threshold up, if not given."""
        ends = ends or (threshold, float(np.abs(elements.values).max(initial=0)))
        return Selection(elements, elements, threshold, ends)

    def lost(self) -> SparseVector:
        """Return what rounding took from the elements."""
        return self.elements.with_values(self.elements.values - self.sent.values)


def remainder(mine: Selection, reached: Indices, kept: Selection) -> SparseVector | None:
    """Return this rank's rounding errors, of what it sent (the elements at `reached`) and of the sums that it keeps.

    None if values are sent unchanged: also where a sum has overflowed, see `WireCodec.for_magnitudes`.
    """
    if kept.sent is kept.elements:
        return None
    return sum_of([mine.lost().take(reached), kept.lost()])

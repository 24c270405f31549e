"""Global top-k by threshold, over the reduced elements that lie scattered over their owners; exact at every step.

The paper evaluates a threshold every τ′ steps by gathering all reduced elements, up to P k of them: more than the
volume it promises. Here two short messages give the exact k-th magnitude. By *sketches* (sketches.py) all ranks learn
two magnitudes with the k-th between them. Then the few that lie between them are gathered; or, if many elements are
equal there, as sums of values in 4 bits are, their different magnitudes with their counts. A histogram would not do:
reduced magnitudes crowd just above the local thresholds. If the sketches do not reach, as one rank holds nearly
all large magnitudes, a radix search takes over: four (float64: eight) allreduces of 256 counts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..kernels import KERNELS
from ..transport.base import Bytes, Counts, Transport, allgather_rows
from ..vectors.sparse import Bits, SparseVector, from_bits, to_bits
from .local_top_k import top_k
from .selection import Selection
from .sketches import Bracket, Sketches, first_places, sketch, sketch_shape

DIGIT_BITS = 8
MOST_MAGNITUDES = 1024
"""Most different magnitudes with counts, of all ranks, that take no more words than a radix search."""
TOO_MANY = 2**32 - 1
"""Mark in place of a number of elements."""
SKETCH = 64
"""Magnitudes that a rank tells of its largest 4k/P reduced elements, at equal steps of k/(16 P) elements, if the
threshold is reused.
"""


GUARD = 0.25
"""The share of k that a reused threshold's selection may deviate by."""

Kth = tuple[int, Counts, Counts]
"""The k-th magnitude, as bits, and how many elements of each rank exceed and equal it: int64, shape (P,) each. The
magnitude is 0 if there are fewer than k.
"""
Kept = tuple[Selection, Counts]
"""This rank's part of the elements that are kept of a sum, and the length of every rank's part: int64, shape (P,)."""


def global_top_k(sums: SparseVector, k: int, order: Counts, transport: Transport,
                 local_threshold: float = 0.0) -> Kept:
    """Return this rank's part of the exact global top-k, and the number of elements in each rank's. Collective.

    Args:
        sums: the reduced elements of this rank's region.
        k: number of elements to keep, the same on all ranks; none if 0.
        order: the owners in the order of their regions. Ties go to the lower index.
        transport: to all ranks.
        local_threshold: the threshold of this rank's own selection; it serves the ends of what is sent alone.
    """
    if k == 0:
        return Selection.of(sums[:0], 0.0), np.zeros(transport.size, np.int64)
    sums = sums.compress(sums.values != 0)
    entries, step = sketch_shape(k, transport.size)
    top, reach = sums, step * entries  # further down no sketch reaches
    if len(sums) > reach:
        top = sums.passing(KERNELS.kth_magnitude(sums.values, reach))
    ascending = np.sort(to_bits(top.values))
    mine = sketch(ascending, step, entries - 1, int(first_places(step, transport.size)[transport.rank]))
    rows = allgather_rows(np.concatenate([to_bits(np.array([local_threshold], sums.values.dtype)), mine]), transport)
    bits, above, equal = (_kth_by_sketches(ascending, Sketches(rows[:, 1], rows[:, 2:], step), k, transport)
                          or radix_kth_magnitude(to_bits(sums.values), k, transport))
    quotas = _quotas(equal, k - int(above.sum()), order)
    threshold = from_bits(bits, sums.values.dtype)
    chosen = sums.passing(threshold)
    surplus = np.flatnonzero(np.abs(chosen.values) == threshold)[quotas[transport.rank]:]
    return _selection(chosen.without(surplus), threshold, rows[:, 0], rows[:, 1]), above + quotas


def keep_all(sums: SparseVector, transport: Transport, local_threshold: float = 0.0,
             keeps_zeros: bool = False) -> Kept:
    """Select everything, for a k that all sums together cannot exceed; see `global_top_k`. Collective.

    If `keeps_zeros`, as values are rounded, to zero too, sums that are zero stay where no index is left out: then no
    index need be sent.
    """
    if local_threshold or not keeps_zeros or not sums.is_consecutive:
        sums = sums.compress(sums.values != 0)
    mine = to_bits(np.array([local_threshold, np.abs(sums.values).max(initial=0)], sums.values.dtype))
    rows = allgather_rows(np.append(mine, mine.dtype.type(len(sums))), transport)
    return _selection(sums, 0.0, rows[:, 0], rows[:, 1], keeps_zeros), rows[:, 2].astype(np.int64)


def top_k_by_reuse(threshold: float, sums: SparseVector, k: int, order: Counts, fits: Callable[[Counts], bool],
                   transport: Transport, local_threshold: float = 0.0) -> Kept:
    """Select by the last threshold; all, if there are at most k elements. Collective.

    If the last threshold selects less than (1 - GUARD) k, more than (1 + GUARD) k, or more than fits the promised
    volume, sketches decide. They come with the sizes that are gathered anyway, and tell each rank's number to
    send: k elements in all, less k/(16 P) at most, near the exact top-k, without another message.
    `fits` returns True for sizes, by rank, that keep to the volume. The other arguments are `global_top_k`'s.
    """
    sums = sums.compress(sums.values != 0)
    magnitudes = np.abs(sums.values)
    passes = magnitudes >= magnitudes.dtype.type(threshold)
    step = max(1, -(-k // (SKETCH // 4 * transport.size)))
    mine = sketch(np.sort(to_bits(magnitudes)), step, 1 + SKETCH)
    counts = np.array([len(sums), passes.sum(), to_bits(np.array([local_threshold], magnitudes.dtype))[0]], np.int64)
    rows = transport.allgather(np.concatenate([counts, mine.astype(np.int64)]))
    lengths, sizes, local_thresholds, largest, sketches = *rows[:, :4].T, rows[:, 4:]
    if lengths.sum() <= k:
        return _selection(sums, 0.0, local_thresholds, largest), lengths
    if abs(int(sizes.sum()) - k) <= GUARD * k and fits(sizes):
        return _selection(sums.compress(passes), threshold, local_thresholds, largest), sizes
    taken = _largest_of_sketches(sketches, k // step)
    if k < step or not taken.any() or taken.max() == SKETCH:
        return global_top_k(sums, k, order, transport, local_threshold)
    last = sketches[np.arange(len(taken)), taken - 1][taken > 0].min()
    chosen = top_k(sums, int(taken[transport.rank]) * step)
    return _selection(chosen, from_bits(int(last), magnitudes.dtype), local_thresholds, largest), taken * step


def _selection(chosen: SparseVector, threshold: float, local_thresholds: Bits, largest: Bits,
               may_be_zero: bool = False) -> Selection:
    """Return what is kept, with ends that all ranks know: the smallest and the largest magnitude kept anywhere.

    If all sums are kept, the smallest is approximated by the least local threshold of all ranks: smaller sums are
    few, as terms have to cancel. It is not known if all sums are smaller, nor, if sums may be zero, where a local
    threshold is 0. `largest` holds the largest sum of every rank.
    """
    dtype, known = chosen.values.dtype, local_thresholds[local_thresholds > 0]
    top = from_bits(int(largest.max()), dtype)
    has_zeros = may_be_zero and len(known) < len(local_thresholds)
    lowest = threshold or (from_bits(int(known.min()), dtype) if len(known) and not has_zeros else 0.0)
    return Selection.of(chosen, threshold, (lowest if lowest <= top else 0.0, top))


def _kth_by_sketches(ascending: Bits, sketches: Sketches, k: int, transport: Transport) -> Kth | None:
    """Find the k-th magnitude; None if the sketches do not tell, on all ranks alike.

    `ascending` holds this rank's largest magnitudes.
    """
    certain = sketches.bracket(k)
    if certain is None:
        return None
    if certain.limit == certain.lowest + 1:  # one value
        start, stop = _within(certain, ascending)
        above, equal = transport.allgather(np.array([len(ascending) - stop, stop - start])).T
        there_are_fewer = above.sum() + equal.sum() < k
        return (0, above + equal, np.zeros_like(equal)) if there_are_fewer else (certain.lowest, above, equal)
    if certain.at_most.sum() > 4 * sketches.step * transport.size:
        start, stop = _within(certain, ascending)
        return _kth_by_counts(ascending[start:stop], len(ascending) - stop, k, transport)
    likely = sketches.likely_bracket(k, certain)
    found = likely and _kth_between(ascending, likely, k, transport)
    # A magnitude of 0 says that the k-th lies below the likely range: the certain one has it.
    return found if found and found[0] else _kth_between(ascending, certain, k, transport)


def _within(bracket: Bracket, ascending: Bits) -> Counts:
    return np.searchsorted(ascending, np.array([bracket.lowest, bracket.limit], ascending.dtype))


def _kth_between(ascending: Bits, bracket: Bracket, k: int, transport: Transport) -> Kth | None:
    """Find the k-th magnitude in a bracket; 0 if it lies below, too.

    None if it lies above, or if more than `at_most` magnitudes of a rank lie inside.
    """
    start, stop = _within(bracket, ascending)
    row = np.zeros(1 + bracket.at_most[transport.rank], ascending.dtype)
    if stop - start < len(row):
        row[0], row[1:1 + stop - start] = len(ascending) - stop, ascending[start:stop]
    else:
        row[0] = TOO_MANY
    rows = _gather(row, 1 + bracket.at_most, transport)
    above = np.array([int(row[0]) for row in rows])
    if TOO_MANY in above:
        return None
    between = [row[1:][row[1:] > 0] for row in rows]
    joined = np.concatenate(between)
    position = len(joined) - (k - int(above.sum()))
    if position < 0:
        return 0, above + [len(part) for part in between], np.zeros_like(above)
    if position >= len(joined):
        return None
    threshold = np.partition(joined, position)[position]
    return (int(threshold), above + [int((part > threshold).sum()) for part in between],
            np.array([int((part == threshold).sum()) for part in between]))


def _kth_by_counts(between: Bits, larger: np.int64, k: int, transport: Transport) -> Kth | None:
    """Find the k-th magnitude by counting equal ones; None if too few are equal.

    `between` holds this rank's magnitudes in the range that holds the k-th of all, unless there are fewer. `larger`
    is the number of this rank's magnitudes above the range.
    """
    mine = np.stack([part.astype(between.dtype) for part in np.unique(between, return_counts=True)])
    above, lengths = transport.allgather(np.array([larger, mine.shape[1]])).T
    if lengths.sum() > MOST_MAGNITUDES:
        return None
    rows = [row.reshape(2, -1) for row in _gather(mine.ravel(), 2 * lengths, transport)]
    magnitudes, counts = np.concatenate(rows, axis=1)
    descending = np.argsort(magnitudes)[::-1]
    reached = np.cumsum(counts[descending], dtype=np.int64)
    place = int(np.searchsorted(reached, k - int(above.sum())))
    threshold = int(magnitudes[descending[place]]) if place < len(reached) else 0
    return (threshold, above + [int(each[1][each[0] > threshold].sum()) for each in rows],
            np.array([int(each[1][each[0] == threshold].sum()) for each in rows]))


def radix_kth_magnitude(bits: Bits, k: int, transport: Transport) -> Kth:
    """Find the exact k-th largest of all ranks' magnitudes. Collective.

    The bits are this rank's, and none of them is 0.
    """
    prefix, wanted, left = 0, k, bits
    for shift in range(8 * bits.dtype.itemsize - DIGIT_BITS, -1, -DIGIT_BITS):
        digits = (left >> bits.dtype.type(shift)).astype(np.int64) & (2**DIGIT_BITS - 1)
        histogram = transport.allreduce(np.bincount(digits, minlength=2**DIGIT_BITS).astype(np.int64))
        at_least = np.cumsum(histogram[::-1])[::-1]  # at_least[d]: values whose digit is d or more
        if at_least[0] < wanted:
            prefix = 0
            break
        digit = int(np.flatnonzero(at_least >= wanted)[-1])
        wanted -= int(at_least[digit] - histogram[digit])
        prefix = prefix << DIGIT_BITS | digit
        left = left[digits == digit]
    above, equal = transport.allgather(np.array([(bits > prefix).sum(), (bits == prefix).sum()], np.int64)).T
    return prefix, above, equal


def _gather(row: Bits, lengths: Counts, transport: Transport) -> list[Bits]:
    message: Bytes = row.view(np.uint8)
    return [part.copy().view(row.dtype) for part in transport.allgatherv(message, row.itemsize * lengths)]


def _quotas(equal: Counts, ties: int, region_order: Counts) -> Counts:
    """Return how many elements equal to the threshold each rank sends: `ties` in all, those of lowest index."""
    quotas = np.empty_like(equal)
    before = np.cumsum(equal[region_order]) - equal[region_order]
    quotas[region_order] = np.clip(ties - before, 0, equal[region_order])
    return quotas


def _largest_of_sketches(sketches: Counts, wanted: int) -> Counts:
    """Return how many entries of each sketch are among the `wanted` largest of all: int64, shape (P,).

    Entries are bits of magnitudes, which have the order of the magnitudes. Ties go to the lower rank.
    """
    order = np.argsort(-sketches.ravel(), kind="stable")[:wanted]
    order = order[sketches.ravel()[order] > 0]
    return np.bincount(order // sketches.shape[1], minlength=len(sketches)).astype(np.int64)

"""Any scheme where each host is one worker: a host selects together, and each of its ranks exchanges a slice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..phases.agreement import tell
from ..phases.link import Link
from ..schemes.algorithm import NOTHING, Algorithm, Call, Memory, Result
from ..selection.accumulator import Accumulator
from ..selection.global_top_k import global_top_k
from ..selection.selection import Selection
from ..transport.base import Counts, Transport
from .hosts import Hosts


class OnHosts(Algorithm):
    """A scheme among hosts. Each rank runs `inner`, the scheme's algorithm, for its slice.

    A host selects exactly k elements, as one rank would. Of its slice a rank exchanges what the host has selected
    there, with the ranks that hold the same slice on the other hosts, and keeps as many elements of the sum as the
    slice has of all that hosts have selected. `select` is collective on the host, `exchange` among all ranks.
    """

    def __init__(self, inner: Algorithm, hosts: Hosts) -> None:
        self._inner, self._hosts, self.value_dtype = inner, hosts, inner.value_dtype

    def select(self, acc: Accumulator, k: int, memory: Memory) -> Selection:
        """Return the part of the host's selection that lies in this rank's slice: of its exact top-k, if jointly."""
        within = self._hosts.within
        if not self._inner.selects_jointly:
            return self._inner.select(acc, -(-k // within.size), memory)
        mine = self._inner.select(acc, max(1, min(k, acc.n)), memory)
        with within.phase("host_select"):
            joint, _ = global_top_k(mine.elements, k, np.arange(within.size), within)
        return Selection.of(joint.elements, joint.ends[0], joint.ends)

    def exchange(self, mine: Selection, call: Call, memory: Memory, link: Link) -> Result:
        across = replace(link, transport=self._hosts.across)
        result = self._inner.exchange(mine, self._call_of_slice(mine, call, memory, across), memory, across)
        return replace(result, update=self._hosts.gather(result.update, call.n))

    def _call_of_slice(self, mine: Selection, call: Call, memory: Memory, across: Link) -> Call:
        """Return the call of this slice, once its ranks have told what each host has selected and remembers.

        k is divided in proportion to what all hosts have selected of each slice, and k' by how many elements that can
        be: no more than the slice has, as hosts select the same ones.
        """
        within, own = self._hosts.within, self._hosts.slice_of(call.n)
        n = int(own.stop - own.start)
        counts = self._inner.counts(mine, n, memory, across.transport.size)
        with across.transport.phase("agree"):
            told, counts = tell(np.array([len(mine.elements), memory.digest()], np.uint32), counts, across.transport)
        lengths, in_sync = told[:, 0].astype(np.int64), call.in_sync and bool((told[:, 1] == told[0, 1]).all())
        with within.phase("host_agree"):
            selected, places = within.allgather(np.array([lengths.sum(), min(lengths.sum(), n)])).T
        k, kept = call.k * selected[within.rank] / max(1, selected.sum()), apportioned(call.kept, places)[within.rank]
        return replace(call, in_sync=in_sync, n=n, k=k, kept=int(kept), k_as_kept=call.k * kept / max(1, call.kept),
                       counts=counts, lengths=lengths)

    def counts(self, mine: Selection, n: int, memory: Memory, size: int) -> Counts:  # noqa: ARG002
        """Return nothing: ranks with the same slice tell each other."""
        return NOTHING

    def digest(self, memory: Memory) -> int:
        """Return 1 for a complete memory: each slice has one of its own, and its ranks compare theirs."""
        return int(memory.digest() > 0)

    def global_k(self, k: int, n: int, size: int) -> int:
        return self._inner.global_k(k, n, size)

    def workers(self, transport: Transport) -> int:  # noqa: ARG002
        return self._hosts.across.size


def apportioned(total: int, weights: Counts) -> Counts:
    """Return whole numbers in proportion to the weights, whose sum is `total`, or that of the weights if it is less.

    Largest remainders are rounded up; the lower index first (Hamilton's method).
    """
    whole = int(weights.sum())
    if total >= whole:
        return weights
    numbers = total * weights // whole
    missing = total - int(numbers.sum())
    by_remainder = np.argsort(-(total * weights % whole), kind="stable")
    numbers[by_remainder[:missing]] += 1
    return numbers

"""The base of accumulators in host memory: the pass over acc also collects the probable selection."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels import CHUNK, KERNELS, CandidateBuffer, Kernels
from ..vectors.sparse import SparseVector, concatenate
from .allocator import keep_freed_memory


class CollectingAccumulator:
    """An Accumulator's `expect` and `select`; see there. A derived class gives `_collect`.

    kernels: the loops over the elements; in C++ if that was built.
    """

    def __init__(self, n: int, dtype: Any = np.float32, kernels: Kernels = KERNELS) -> None:
        keep_freed_memory()
        self.n = n
        self.dtype = np.dtype(dtype)
        self.expected = np.inf
        self._kernels = kernels
        self._candidates = CandidateBuffer(0, self.dtype)
        self._bound: float | None = None  # what the candidates of this acc pass; None: they are of no use

    def expect(self, threshold: float, limit: int) -> None:
        self.expected, self._bound = threshold, None
        if limit != self._candidates.capacity:
            self._candidates = CandidateBuffer(limit, self.dtype)

    def select(self, threshold: float, limit: int) -> SparseVector | None:
        candidates = self._candidates
        if self._bound is not None and candidates.count <= candidates.capacity and threshold >= self._bound:
            found = _collected(candidates)
            if threshold > self._bound:
                found = found.passing(threshold)
            return found if len(found) <= limit else None
        if self._bound is not None and limit <= candidates.capacity < candidates.count and threshold <= self._bound:
            return None
        return self._select_in_a_pass(threshold, limit)

    def _select_in_a_pass(self, threshold: float, limit: int) -> SparseVector | None:
        buffer, found, count = CandidateBuffer(CHUNK // 2, self.dtype), [], 0
        for start in range(0, self.n, buffer.capacity):
            buffer.count = 0
            self._collect(start, min(start + buffer.capacity, self.n), threshold, buffer)
            count += buffer.count
            if count > limit:
                return None
            found.append(_collected(buffer).copy())
        return concatenate(found, self.dtype)

    def _collect(self, start: int, stop: int, threshold: float, buffer: CandidateBuffer) -> object:
        """Collect the elements of acc[start:stop] that pass."""
        raise NotImplementedError


def _collected(buffer: CandidateBuffer) -> SparseVector:
    return SparseVector(buffer.indices[:buffer.count], buffer.values[:buffer.count])

"""The two sets of parameters of one model: w, which all ranks share, and p, this rank's own, in the model.

This rank's residual is w - p, and is stored nowhere.
"""

from __future__ import annotations

import hashlib
import zlib

import numpy as np

from ...schemes.algorithm import Algorithm
from ...selection.parameter_accumulator import ParameterAccumulator, Replica
from ...transport.base import Transport, broadcast
from ...transport.counting import CountingTransport, Hosts
from ...vectors.sparse import DenseVector, SparseVector, Values
from .hosts import HostMember


class Model:
    """One rank's w and p. accumulator: holds w. replica: gives access to p, in the model."""

    def __init__(self, accumulator: ParameterAccumulator, replica: Replica) -> None:
        self.is_swapped = False
        """True while the model holds w."""
        self.digest = ""
        """A short text that differs if one bit of w does; as of `start` or `look_again`."""
        self._accumulator, self._replica = accumulator, replica
        self._member = HostMember(accumulator)
        self._anticipated: SparseVector | None = None  # what p goes back by before an exchange is applied

    def start(self, copies: int) -> None:
        """Take p as w. copies: number of ranks that have the same residual."""
        self._accumulator.start(self._replica.pieces())
        self.look_again()
        self.copies, self.is_swapped = copies, False

    @property
    def n(self) -> int:
        """Number of elements of w."""
        return self._accumulator.n

    @property
    def copies(self) -> int:
        """Number of consecutive ranks that have this rank's residual."""
        return self._member.copies

    @copies.setter
    def copies(self, copies: int) -> None:
        self._member.copies = copies

    def swap(self) -> None:
        """Swap w and p: the model holds the other one."""
        self._replica.swap(self._accumulator.shared)
        self.is_swapped = not self.is_swapped

    # A step.

    def read(self, algorithm: Algorithm, k: int, transport: CountingTransport) -> tuple[ParameterAccumulator, bool,
                                                                                        bool]:
        """Return this rank's part of w - p; True if the part is finite; True if all of the host's parts are.

        Only the accumulator holds the parameters' memory afterwards, until the accumulator is released.
        """
        pieces = self._replica.pieces()
        acc, own = self._member.share_of(pieces, transport.hosts)
        with transport.phase("accumulate"):
            finite = acc.accumulate(own)
        all_finite = algorithm.agree_on_host(k, transport, finite=finite)
        self._member.check_alike(pieces, algorithm, k, transport)
        return acc, finite, all_finite

    def anticipate(self, selected: SparseVector, coefficient: float) -> None:
        """Move p, until the exchange is applied, as if all ranks had selected the same as this one.

        A local step moves p by only a fraction λ (`coefficient`) of the optimizer's step; the exchange adds the rest.
        If the rest arrived one step late, then with large learning rates and momentum the gradients would be computed
        at stale parameters. selected = w - p at the selected elements, which is λ of a step already.
        """
        if coefficient < 1:
            factor = selected.values.dtype.type(1 / coefficient - 1)
            self._anticipated = SparseVector(selected.indices, factor * selected.values)
            self._replica.add(SparseVector(selected.indices, -self._anticipated.values))

    def take_back(self) -> None:
        """Move p back by what was anticipated."""
        if self._anticipated is not None:
            self._replica.add(self._anticipated)
            self._anticipated = None

    def forget_anticipated(self) -> None:
        """Leave p as it is: it is about to be set anew."""
        self._anticipated = None

    def apply(self, update: SparseVector | DenseVector, change: SparseVector | DenseVector) -> None:
        """Set w to w - update, and p to p + change: what contributed leaves w - p, what rounding left over stays."""
        self._accumulator.commit(update)
        self._replica.add(change)

    # The residual.

    def take_residual(self) -> Values:
        """Return w - p, in the order of indices; set p to w - (w - p), which rounds p, as a resumed run has it."""
        self._accumulator.accumulate(self._replica.pieces())
        residual = self._accumulator.values()
        self._accumulator.release()
        self._replica.assign(self._accumulator.minus(residual))
        return self._replica.logical(residual)

    def set_residual(self, residual: Values) -> None:
        """Set p to w - residual."""
        self._replica.assign(self._accumulator.minus(self._replica.in_memory(residual)))

    # The ranks.

    def become_alike(self, hosts: Hosts, adds: bool, was_loaded: bool) -> None:
        """Give the ranks of a host one residual; see HostMember. Collective on the host."""
        self._member.become_alike(self._replica, hosts, adds, was_loaded)

    def adopt(self, transport: Transport) -> bool:
        """Set p to rank 0's w if a rank has another w. Collective. Return True if this rank has; then start anew."""
        digests = transport.allgather(np.frombuffer(bytes.fromhex(self.digest), np.int64))[:, 0]
        if (digests == digests[0]).all():
            return False
        first = broadcast(self._accumulator.read_shared(), transport)
        if digests[transport.rank] == digests[0]:
            return False
        self._replica.assign(first)
        return True

    def checksum(self) -> int:
        """Return a number that almost certainly differs if w does; faster than a digest."""
        return zlib.crc32(np.ascontiguousarray(self._accumulator.read_shared()).view(np.uint8).data)

    def look_again(self) -> None:
        """Take the digest of the present w."""
        values = np.ascontiguousarray(self._replica.logical(self._accumulator.read_shared()))
        self.digest = hashlib.blake2b(values.view(np.uint8).data, digest_size=8).hexdigest()

"""A scheme's algorithm among the ranks of one optimizer, while elastic training may change who they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import TransportError
from ..kernels import KERNELS
from ..phases.agreement import Attendance, roll_call
from ..schemes.base import Scheme, Unit
from ..schemes.report import StepReport, sum_of_phases
from ..transport.connect import connect
from ..transport.counting import CountingTransport
from ..transport.ranks import Membership, Ranks
from ..vectors.sparse import Layout

logger = logging.getLogger("horovod_oktopk")


class Reduction:
    """The reduction of one layout's vectors; one object on each rank. The transport is made when it is first needed.

    describe: returns the text on a scheme that must be equal on all ranks, one "name: value" a line.
    title: returns the name of the compression, for the log.
    """

    def __init__(self, scheme: Scheme, unit: Unit, layout: Layout, ranks: Ranks, describe: Callable[[Scheme], str],
                 title: Callable[[], str]) -> None:
        self.scheme = scheme
        self.ranks = ranks
        self.algorithm = scheme.algorithm(unit)
        self.report: StepReport | None = None
        """Report of the last step; None before the first."""
        self._layout, self._describe, self._title = layout, describe, title
        self._described: Scheme | None = None
        self._transport: CountingTransport | None = None
        self._membership: Membership | None = None

    @property
    def k(self) -> int:
        """Number of elements to select; 0 of nothing."""
        return self.scheme.k_of(self._layout.n) if self._layout.n else 0

    @property
    def description(self) -> str:
        """The options and parameters that must be equal on all ranks."""
        return self._describe(self.scheme)

    @property
    def transport(self) -> CountingTransport:
        """The transport to the present ranks; after `connect`."""
        assert self._transport is not None
        return self._transport

    @property
    def is_current(self) -> bool:
        """True if there is a transport, and its ranks are the present ones."""
        return self._transport is not None and self._membership == self.ranks.membership()

    def lost(self) -> bool:
        """Drop a transport to former ranks; return True if there was one."""
        if self._transport is None or self.is_current:
            return False
        self._transport = None
        return True

    def connect(self, said: str | None = None) -> CountingTransport:
        """Return the transport to all ranks. A new one begins with a roll call, so that differences show at once.

        said: this rank's description; by default that of the scheme. Collective.
        Raise AgreementError if the ranks differ, TransportError if Horovod and the transport number the ranks
        differently.
        """
        if self._transport is None:
            self._membership = rank, size, _ = self.ranks.membership()
            transport = connect(self.ranks, self.scheme.transport, self.scheme.hierarchical)
            everyone = transport.everyone
            if (everyone.rank, everyone.size) != (rank, size):
                raise TransportError(f"Horovod calls this rank {rank} of {size}; the transport calls it "
                                     f"{everyone.rank} of {everyone.size}")
            roll_call(Attendance(said or self.description, self.k, step=0), everyone)
            self._transport = transport
            if rank == 0:
                logger.info("%s: %s; %s; kernels in %s", self._title(), self._layout.summary(self.k),
                            _ranks_of(transport), KERNELS.name)
        return self._transport.everyone

    def check_agreement(self, said: str, finite: bool = True) -> bool:
        """Hold a roll call alone; return True if all ranks are `finite`. Collective."""
        return self.algorithm.check_agreement(said, self.k, self.transport, finite)

    def open(self) -> CountingTransport:
        """Return the transport for a step, which counts anew; the step's roll call has the present description."""
        self.describe()
        self.transport.reset()
        return self.transport

    def describe(self) -> None:
        """Give the algorithm the description of the present scheme; no roll call may be under way."""
        if self.scheme is not self._described:
            self.algorithm.description, self._described = self.description, self.scheme

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Count and time the block as the last step's write-back; the report shares nothing with the transport."""
        assert self.report is not None
        self.transport.reset()
        with self.transport.phase("write_back"):
            yield
        self.report.phases = sum_of_phases([self.report.phases, self.transport.phases])
        self.transport.reset()


def _ranks_of(transport: CountingTransport) -> str:
    """Return the number of ranks and their route, for the log."""
    hosts = transport.hosts
    where = "" if hosts is None else f" on {len(hosts.grid)} hosts, each of which is one worker,"
    size = transport.everyone.size
    return f"{size} ranks{where} over {transport.route}" if size > 1 else "1 rank"

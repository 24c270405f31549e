"""The ranks of one reduction, while elastic training may change who they are."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..errors import TransportError
from ..kernels import KERNELS
from ..phases.agreement import Attendance, roll_call
from ..transport.base import Hierarchical, TransportName
from ..transport.connect import connect
from ..transport.counting import CountingTransport, Hosts
from ..transport.ranks import Membership, Ranks

logger = logging.getLogger("horovod_oktopk")


class Connection:
    """The transport among the ranks, made when it is first needed; one object on each rank.

    subject: returns a text on the reduction.
    """

    def __init__(self, ranks: Ranks, choice: TransportName, hierarchical: Hierarchical,
                 subject: Callable[[], str]) -> None:
        self.ranks = ranks
        self._choice, self._hierarchical, self._subject = choice, hierarchical, subject
        self._transport: CountingTransport | None = None
        self._membership: Membership | None = None

    @property
    def transport(self) -> CountingTransport:
        """The transport to the present ranks; after `connect`."""
        assert self._transport is not None
        return self._transport

    @property
    def hosts(self) -> Hosts | None:
        """The hosts, if each is one worker; None otherwise."""
        return self.transport.hosts

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

    def connect(self, description: str, k: int) -> CountingTransport:
        """Return the transport. A new one begins with a roll call, so that ranks with different options fail at once.

        Collective. Raise AgreementError if the ranks differ, TransportError if Horovod and the transport number the
        ranks differently.
        """
        if self._transport is None:
            self._membership = rank, size, _ = self.ranks.membership()
            transport = connect(self.ranks, self._choice, self._hierarchical)
            everyone = transport.everyone
            if (everyone.rank, everyone.size) != (rank, size):
                raise TransportError(f"Horovod calls this rank {rank} of {size}; the transport calls it "
                                     f"{everyone.rank} of {everyone.size}")
            roll_call(Attendance(description, k, step=0), everyone)
            self._transport = transport
            if rank == 0:
                logger.info("%s; %s; kernels in %s", self._subject(), _ranks_of(transport), KERNELS.name)
        return self._transport


def _ranks_of(transport: CountingTransport) -> str:
    """Return the number of ranks and their route, for the log."""
    hosts = transport.hosts
    where = "" if hosts is None else f" on {len(hosts.grid)} hosts, each of which is one worker,"
    size = transport.everyone.size
    return f"{size} ranks{where} over {transport.route}" if size > 1 else "1 rank"

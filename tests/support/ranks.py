"""The protocol Ranks, over threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from horovod_oktopk.transport.base import Counts
from horovod_oktopk.transport.ranks import Membership, NoMPI, Ranks


class ThreadRanks(Ranks):
    """All ranks of a ThreadWorld. base: one object on each rank; the transport, if not given."""

    yield_cpu, takes_part, collectives = False, True, "threads"

    def __init__(self, transport: Any, channel: int = 0, base: Any = None) -> None:
        self._transport, self.channel, self.base, self.resets = transport, channel, base or transport, 0

    def membership(self) -> Membership:
        return Membership(self._transport.rank, self._transport.size, self.resets)

    def host(self) -> tuple[int, int | None]:
        return 0, self._transport.size

    def divide(self, groups: Iterable[Counts]) -> None:
        pass

    def transport(self, channel: int | str, members: Counts | None = None) -> Any:
        return self._transport if members is None else self._transport.group(members.tolist(), str(channel))

    def mpi_rank(self) -> NoMPI:
        return NoMPI("there is none (start the job with `horovodrun --mpi`)", warns=False)


class ElasticRanks(ThreadRanks):
    """Ranks of an elastic job, each of which may be left alone, meet the others again, or meet new ones."""

    is_alone = False

    def become(self, is_alone: bool) -> None:
        self.is_alone = is_alone
        self.resets += 1

    def join(self, transport: Any) -> None:
        """Be one of other ranks from now on."""
        self._transport = transport
        self.resets += 1

    def membership(self) -> Membership:
        return Membership(0, 1, self.resets) if self.is_alone else super().membership()

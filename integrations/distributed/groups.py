"""Process groups of Gloo of our own, which carry the messages beside whatever backend a program has chosen.

They are made by the public class, and not by `new_group`: only their members have to make them, PyTorch's registry
knows nothing of them, and destroy_process_group leaves an exchange under way alone.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import os
import socket
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from horovod_oktopk.distributed.notes import Call, Notes
from horovod_oktopk.distributed.private import default_store, timeout_of
from horovod_oktopk.errors import PluginError, TransportError
from horovod_oktopk.modes.step_ahead.mode import close_all
from horovod_oktopk.transport.base import Bytes, Counts, Transport, Values
from horovod_oktopk.transport.ending import EARLY, note_status, unhappy_end
from horovod_oktopk.transport.ranks import Membership, NoMPI, Ranks
from horovod_oktopk.transport.stalls import noticed

NO_GROUP = ("torch.distributed has not been started: call dist.init_process_group(\"gloo\") (or \"nccl\", or "
            "\"cpu:gloo,cuda:nccl\") first, and start the program by torchrun")
NO_STORE = ("this process group has no store, by which the ranks of our own groups find each other (PyTorch's MPI "
            "backend has none): call dist.init_process_group(\"gloo\"), or \"nccl\"")
ENDED = ("torch.distributed was ended while the optimizer was still in use: call dist.destroy_process_group after "
         "the last step")
NO_MPI = NoMPI("torch.distributed has started this job, and not `horovodrun --mpi`", warns=False)
SPREAD = 2
"""An allgather of padded messages receives at most this many times their bytes; more uneven ones are broadcast."""


class Group:
    """One of a program's process groups, as long as torch.distributed lives: its ranks, its store, its nodes."""

    def __init__(self, process_group: Any) -> None:
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        store = default_store()
        if store is None:
            raise PluginError(NO_STORE)
        # A restart by torchrun keeps the store, with the addresses of ranks that are gone: this name is new.
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, dist.get_global_rank(process_group, 0), process_group)
        self._store, self._timeout = dist.PrefixStore(f"horovod_oktopk/{name[0]}", store), timeout_of(process_group)
        self.notes = Notes(self._store, self.rank)
        _leave_in_time()
        self.shared: dict[str, GroupTransport] = {}
        """Transports of channels that several optimizers use."""
        self.nodes = self._nodes()

    def transport(self, channel: int | str, members: Sequence[int] | None, kept: dict[str, GroupTransport],
                  ) -> GroupTransport:
        """Return the transport of a channel among some ranks, or all, from `kept`. Collective on these at first."""
        members = range(self.size) if members is None else members
        name = f"{channel}/{'.'.join(map(str, members)) if len(members) < self.size else 'all'}"
        if name not in kept:
            gloo = dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), members.index(self.rank), len(members),
                                         self._timeout)
            kept[name] = GroupTransport(gloo, self.notes, name, members)
        return kept[name]

    def _nodes(self) -> list[int]:
        """Return, by rank, the first rank on the same node."""
        digest = hashlib.sha256(socket.gethostname().encode()).digest()[:8]
        everyone = self.transport("nodes", None, self.shared)
        names = everyone.allgather(np.frombuffer(digest, np.int64))[:, 0].tolist()
        return [names.index(name) for name in names]


class GroupTransport(Transport):
    """A process group of Gloo that carries one channel. Members have their numbers in the program's group."""

    concurrent = True

    def __init__(self, gloo: Any, notes: Notes, name: str, members: Sequence[int]) -> None:
        self.rank, self.size = members.index(notes.rank), len(members)
        self._gloo, self._notes, self._name, self._members = gloo, notes, name, members
        self._calls = 0
        _living.add(self)

    def allgather(self, row: Values) -> Values:
        rows = np.empty((self.size, len(row)), row.dtype)
        self._wait(lambda: self._gloo.allgather([[*torch.from_numpy(rows)]], [_tensor(row)]))
        return rows

    def alltoall(self, rows: Counts) -> Counts:
        found = np.empty_like(rows)
        self._wait(lambda: self._gloo.alltoall_base(torch.from_numpy(found), _tensor(rows), [], []))
        return found

    def allreduce(self, values: Values) -> Values:
        total = values.copy()
        self._wait(lambda: self._gloo.allreduce([torch.from_numpy(total)]))
        return total

    def send_and_receive(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                         ) -> Iterator[list[tuple[int, Bytes]]]:
        """Exchange all messages in one batch."""
        sends, receives = ([int(sizes.get(rank, 0)) for rank in range(self.size)]
                           for sizes in ({to: len(message) for to, message in outgoing.items()}, incoming))
        joined = np.concatenate([np.empty(0, np.uint8), *(outgoing[to] for to in sorted(outgoing))])
        received = np.empty(sum(receives), np.uint8)
        self._wait(lambda: self._gloo.alltoall_base(torch.from_numpy(received), _tensor(joined), receives, sends))
        sources = sorted(incoming)
        yield list(zip(sources, np.split(received, np.cumsum([incoming[each] for each in sources])[:-1]),
                       strict=True)) if sources else []

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        longest = int(sizes.max())
        if longest * self.size > SPREAD * int(sizes.sum()):
            return [self.broadcast(message, source, int(size)) for source, size in enumerate(sizes)]
        padded = np.zeros(longest, np.uint8)
        padded[:len(message)] = message
        return [row[:size] for row, size in zip(self.allgather(padded), sizes, strict=True)]

    def broadcast(self, message: Bytes, source: int, size: int) -> Bytes:
        """Return the source's message, of this size on all ranks; elsewhere the message that is given is ignored."""
        found = message.copy() if source == self.rank else np.empty(size, np.uint8)
        if size:
            self._wait(lambda: self._gloo.broadcast(torch.from_numpy(found), source))
        return found

    def _wait(self, begin: Callable[[], Any]) -> None:
        """Make a call, and wait for its end. Raise TransportError that says who has ended, if it fails."""
        self._calls += 1
        call = Call(self._notes, self._name, self._calls, self._members)
        try:
            with noticed(call.note_wait):
                begin().wait()
        except RuntimeError as error:
            raise TransportError(call.explain(error)) from error


class GroupRanks(Ranks):
    """The ranks of a process group of torch.distributed; None is the group of all ranks, whichever that is now."""

    base, collectives = dist, "Gloo"

    def __init__(self, process_group: Any, own_channel: bool = False, yield_cpu: bool = False) -> None:
        self._given, self.yield_cpu = process_group, yield_cpu
        self._generation, self._now = 0, self._found()
        self.channel = next(_channels[self._now]) if own_channel else 0
        self._own: dict[str, GroupTransport] = {}  # which end with this object

    @property
    def takes_part(self) -> bool:
        if not dist.is_initialized():
            raise TransportError(ENDED)
        return self._given is not dist.GroupMember.NON_GROUP_MEMBER

    def membership(self) -> Membership:
        now = self._found() if dist.is_initialized() else self._now
        if now is not self._now:
            self._generation, self._now, self._own = self._generation + 1, now, {}
            if self.channel:  # another may have been drawn for an optimizer that was made since
                self.channel = next(_channels[now])
        if now is dist.GroupMember.NON_GROUP_MEMBER:
            return Membership(0, 1, self._generation)
        return Membership(self.group.rank, self.group.size, self._generation)

    def host(self) -> tuple[int, int | None]:
        first = self.group.nodes[self.group.rank]
        return first, self.group.nodes.count(first)

    def divide(self, groups: Iterable[Counts]) -> None:
        """Do nothing: only the members of a group have to make it."""

    def transport(self, channel: int | str, members: Counts | None = None) -> GroupTransport:
        is_own = self.channel and str(channel).partition(".")[0] == str(self.channel)
        return self.group.transport(channel, None if members is None else members.tolist(),
                                    self._own if is_own else self.group.shared)

    def mpi_rank(self) -> NoMPI:
        return NO_MPI

    @property
    def group(self) -> Group:
        """The present group. Collective at first."""
        if self._now not in _groups:
            _groups[self._now] = Group(self._now)
        return _groups[self._now]

    def _found(self) -> Any:
        return dist.group.WORLD if self._given is None else self._given


_channels: defaultdict[Any, Iterator[int]] = defaultdict(lambda: itertools.count(1))
_groups: dict[Any, Group] = {}
"""By the program's process group, for as long as this process lives."""
_living: weakref.WeakSet[GroupTransport] = weakref.WeakSet()
_pinned: list[GroupTransport] = []
"""In a forked process (a DataLoader's worker), which has none of Gloo's threads: a destructor would wait for them."""
os.register_at_fork(after_in_child=lambda: _pinned.extend(_living))


@functools.cache  # once in a process
def _leave_in_time() -> None:
    note_status()
    atexit.register(_leave)


def _leave() -> None:
    """End the exchanges of this process, and tell the other ranks how it ends."""
    close_all()
    for group in [*_groups.values()]:  # another thread may make one
        group.notes.leave(unhappy_end() or EARLY)


def _tensor(values: Values) -> torch.Tensor:
    return torch.from_numpy(values if values.flags.writeable else values.copy())

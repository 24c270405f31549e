"""Ends and waits of MPI transports: programs that several ranks call with a communicator.

Ranks meet in a barrier of MPI's, where a job has Horovod's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from horovod_oktopk.errors import TransportError
from tests.scenarios.common import logged


@contextmanager
def watched(world: Any, warning: float = 0.0, shutdown: float = 0.0, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a transport and its watchdog, which stops in the end. warning, shutdown: see StallLimits."""
    from horovod_oktopk.transport.mpi.transport import MPITransport
    from horovod_oktopk.transport.mpi.watchdog import StallLimits, Watchdog
    transport, barrier = MPITransport(world.Dup(), **options), world.Dup()
    watchdog = Watchdog(transport.rank, transport.size, StallLimits(warning, shutdown))
    watchdog.watch(transport, tuple(range(transport.size)), barrier.Barrier)
    yield transport, watchdog
    watchdog.stop("has ended")


def gather(transport: Any, times: int) -> None:
    for _ in range(times):
        rows = transport.allgather(np.array([transport.rank], np.int64))
        assert rows[:, 0].tolist() == list(range(transport.size))


def told(action: Callable[[], object]) -> str:
    """Return the text of the TransportError that the action raises."""
    try:
        action()
    except TransportError as error:
        return str(error)
    raise AssertionError("no error was raised")


def whoever_waits_for_a_rank_that_ends_is_told(world: Any) -> None:
    for yield_cpu in (False, True):
        with watched(world, yield_cpu=yield_cpu) as (transport, _):
            last = transport.size - 1
            gather(transport, 3)
            if transport.rank < last:
                assert told(lambda: gather(transport, 5)) == f"rank {last} has ended"
                assert told(lambda: gather(transport, 1)) == f"rank {last} has ended", "it is closed for good"


def whoever_comes_after_a_rank_has_ended_is_told(world: Any) -> None:
    with watched(world) as (transport, watchdog):
        gather(transport, 2)
        if transport.rank == 0:
            watchdog.stop("has come to its end")
        else:
            time.sleep(0.5)
            assert told(lambda: gather(transport, 1)) == "rank 0 has come to its end"


def whoever_waits_for_a_message_is_told(world: Any) -> None:
    with watched(world) as (transport, _):
        gather(transport, 1)
        incoming = {0: 1000}
        if transport.rank:
            assert told(lambda: list(transport.send_and_receive({}, incoming))) == "rank 0 has ended"


def what_all_have_begun_is_ended(world: Any) -> None:
    """Send on rank 0, and end it; the others come later, and get its message."""
    with watched(world) as (transport, _):
        gather(transport, 1)
        message = np.arange(100, dtype=np.uint8)
        if transport.rank == 0:
            list(transport.send_and_receive(dict.fromkeys(range(1, transport.size), message), {}))
        else:
            time.sleep(0.5)
            ((source, came),) = (pair for batch in transport.send_and_receive({}, {0: 100}) for pair in batch)
            assert source == 0
            assert np.array_equal(came, message)


def an_exchange_that_was_given_up_holds_nobody(world: Any) -> None:
    """Fail on a rank between two batches; it keeps what it was doing, and the others wait for its message."""
    with watched(world) as (transport, _):
        gather(transport, 1)
        after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
        transport.messages_in_flight = 1
        given_up = transport.send_and_receive({after: np.zeros(8, np.uint8)}, {before: 8})
        if transport.rank == 0:
            next(given_up)
        else:
            list(given_up)
            assert told(lambda: gather(transport, 1)) == "rank 0 has ended"


def the_missing_are_named(world: Any) -> None:
    with watched(world, warning=0.3) as (transport, _):
        last = transport.size - 1
        gather(transport, 2)
        with logged() as heard:
            if transport.rank == last:
                time.sleep(2.5)
            gather(transport, 1)
        assert bool(heard) == (transport.rank == 0), "one of those that wait says it"
        assert all(f"for ranks [{last}] to come" in text and f"rank {last} was in the last one" in text
                   for text in heard), heard
        gather(transport, 1)


def a_stall_that_lasts_is_an_error_on_all_ranks(world: Any) -> None:
    with watched(world, warning=0.2, shutdown=0.5) as (transport, _):
        last = transport.size - 1
        gather(transport, 2)
        if transport.rank == last:
            time.sleep(3.0)
        assert f"for ranks [{last}] to come" in told(lambda: gather(transport, 1))


def group_of(world: Any, ranks: list[int], parent: Any, watchdog: Any) -> Any:
    """Return a watched transport among some of the ranks; None on the others."""
    from horovod_oktopk.transport.mpi.transport import MPITransport
    if parent.rank not in ranks:
        return None
    transport = MPITransport(world.Create_group(world.group.Incl(ranks), 7))
    watchdog.watch(transport, tuple(ranks), lambda: None, parent)
    return transport


def a_step_is_ended_among_some_of_its_ranks(world: Any) -> None:
    """End rank 0 after a step in which the others still communicate; whoever goes on after it is told."""
    with watched(world) as (transport, watchdog):
        group = group_of(world, list(range(1, transport.size)), transport, watchdog)
        with transport.gate.busy():
            gather(transport, 1)
            if group is not None:
                time.sleep(0.5)
                gather(group, 3)
        if group is not None:
            assert told(lambda: gather(transport, 1)) == "rank 0 has ended"
            assert told(lambda: gather(group, 10**9)) == "rank 0 has ended"


def who_waits_for_one_that_waits_for_a_rank_that_ends_is_told(world: Any) -> None:
    """End the last rank within a step; the one before waits for it, and all others for that one."""
    with watched(world) as (transport, watchdog):
        last = transport.size - 1
        pair = group_of(world, [last - 1, last], transport, watchdog)
        group = group_of(world, list(range(last)), transport, watchdog)
        with transport.gate.busy():
            gather(transport, 1)
            if transport.rank < last:
                waiting = pair if transport.rank == last - 1 else group
                assert told(lambda: gather(waiting, 1)) == f"rank {last} has ended"


def what_is_under_way_keeps_its_memory(world: Any) -> None:
    """Leave an exchange on rank 0, or fail there; megabytes come afterwards, and go into nobody's memory."""
    if world.size < 3:
        return
    from horovod_oktopk.transport.mpi.transport import MPITransport
    for fails in (False, True):
        transport, side = MPITransport(world.Dup()), world.Dup()
        length, last = 1 << 22, world.size - 1
        late = last - 1  # its message is of the second batch
        if world.rank == 0:
            _leave_in_the_middle(transport, {late: length, last: 8}, fails)
            others = [np.zeros(length, np.uint8) for _ in range(8)]
            side.barrier()
            side.recv(source=late)
            assert not any(other.any() for other in others), "MPI has written into memory that others have"
        else:
            if world.rank == last:
                list(transport.send_and_receive({0: np.ones(16 if fails else 8, np.uint8)}, {}))
            side.barrier()
            if world.rank == late:
                list(transport.send_and_receive({0: np.full(length, 7, np.uint8)}, {}))
                side.send(None, 0)
        side.barrier()


def _leave_in_the_middle(transport: Any, incoming: dict[int, int], fails: bool) -> None:
    transport.messages_in_flight = 1
    if fails:  # a message is longer than what was expected
        assert "MPI failed" in told(lambda: list(transport.send_and_receive({}, incoming)))
        return
    for _ in transport.send_and_receive({}, incoming):
        break


ENDINGS = {program.__name__: program for program in (
    whoever_waits_for_a_rank_that_ends_is_told, whoever_comes_after_a_rank_has_ended_is_told,
    whoever_waits_for_a_message_is_told, what_all_have_begun_is_ended, an_exchange_that_was_given_up_holds_nobody,
    the_missing_are_named, a_stall_that_lasts_is_an_error_on_all_ranks, a_step_is_ended_among_some_of_its_ranks,
    who_waits_for_one_that_waits_for_a_rank_that_ends_is_told,
    what_is_under_way_keeps_its_memory)}
"""For two ranks or more."""

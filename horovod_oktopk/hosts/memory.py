"""Memory that the ranks of a host share, so that one reads what another has written without a message."""

from __future__ import annotations

import logging
import mmap
import os

import numpy as np

from ..transport.base import Bytes, Transport

logger = logging.getLogger("horovod_oktopk")

TOKEN = 16
"""Bytes at the beginning of each rank's shared memory, by which other ranks recognize it."""


def shared_memory(length: int, within: Transport) -> list[Bytes] | None:
    """Return `length` bytes of memory of each rank, by rank, which all of them can read and write. Collective.

    Return None on all ranks if they cannot share memory: they are on several machines or in several containers, or
    there is not enough. The memory has no name, and is free as soon as no process uses it.
    """
    descriptor, token = _create(TOKEN + length), os.urandom(TOKEN)
    if descriptor is not None:
        os.pwrite(descriptor, token, 0)
    mine = np.array([-1 if descriptor is None else descriptor, os.getpid(), *np.frombuffer(token, np.int64)])
    rows = within.allgather(mine)
    found = [_open(int(number), int(process), row.tobytes(), TOKEN + length) for (number, process, *_), row
             in zip(rows, rows[:, 2:], strict=True)]
    worked = within.allgather(np.array([all(memory is not None for memory in found)], np.int64))
    if descriptor is not None:
        os.close(descriptor)
    memories = [memory[TOKEN:] for memory in found if memory is not None]
    return memories if worked.all() else None


def _create(length: int) -> int | None:
    descriptor = None
    try:
        descriptor = os.memfd_create("horovod_oktopk")
        os.posix_fallocate(descriptor, 0, length)  # what is not there is found now, and not when it is written to
    except (AttributeError, OSError) as error:  # or not Linux
        logger.debug("no shared memory: %s", error)
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _open(descriptor: int, process: int, token: bytes, length: int) -> Bytes | None:
    try:
        with open(f"/proc/{process}/fd/{descriptor}", "r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), length), np.uint8)
    except (OSError, ValueError) as error:  # as in some containers
        logger.debug("no shared memory of process %d: %s", process, error)
        return None
    return memory if memory[:TOKEN].tobytes() == token else None

"""Contract of every transport, shown of Horovod's own collectives."""

from __future__ import annotations

from tests.scenarios.driver import Kind
from tests.transport.programs import PROGRAMS


def check_horovods_collectives(kind: Kind) -> None:
    """On all ranks, and in both halves at the same time."""
    for process_set in (kind.hvd.global_process_set, *kind.sets):
        if process_set.included():
            for name, program in PROGRAMS.items():
                program(kind.collectives(process_set, name))

"""Started by mpirun: runs all programs over MPI, and prints on rank 0 one line of JSON, name → "ok" or traceback."""

from __future__ import annotations

import json
import sys
import traceback

from mpi4py import MPI

from horovod_oktopk.transport.mpi.transport import MPITransport

from .endings import ENDINGS
from .programs import PROGRAMS, WITH_SIGNALS


def outcome(program, argument) -> str:
    try:
        program(argument)
    except Exception:
        return f"rank {MPI.COMM_WORLD.rank}: {traceback.format_exc()}"
    return "ok"


def main() -> None:
    transport = MPITransport(MPI.COMM_WORLD.Dup())
    results = {name: outcome(program, transport) for name, program in (PROGRAMS | WITH_SIGNALS).items()}
    if transport.size > 1:
        results |= {name: outcome(program, MPI.COMM_WORLD) for name, program in ENDINGS.items()}
    everyone = MPI.COMM_WORLD.gather(results)
    if everyone is not None:
        merged = {name: "\n".join(rank[name] for rank in everyone if rank[name] != "ok") or "ok" for name in results}
        sys.stdout.write(json.dumps(merged) + "\n")


if __name__ == "__main__":
    main()

"""horovodrun without its question whether Horovod was built with MPI or Gloo, for which it imports TensorFlow.

That takes seconds of each launch. The command itself is run in tests/test_launchers.py.
"""

from __future__ import annotations

from horovod.runner import launch


def is_built(verbose: bool) -> bool:
    return True


if __name__ == "__main__":
    launch.mpi_built = launch.gloo_built = is_built
    launch.run_commandline()

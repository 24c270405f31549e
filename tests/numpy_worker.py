"""A rank of a test job (see worker.py) in which the C++ kernels cannot be imported, as if they were not built."""

from __future__ import annotations

import sys


def main() -> None:
    sys.modules["horovod_oktopk.kernels._native"] = None  # type: ignore[assignment]  # importing it is an ImportError
    from horovod_oktopk.kernels import KERNELS, NumpyKernels
    from tests import worker
    assert type(KERNELS) is NumpyKernels
    worker.main()


if __name__ == "__main__":
    main()

"""The loops over many elements: in C++ if the extension was built, in NumPy otherwise, with the same bits."""

from __future__ import annotations

import importlib
from typing import cast

from .numpy_kernels import NumpyKernels
from .protocol import CHUNK, CandidateBuffer, Kernels


def _native() -> Kernels | None:
    try:
        return cast(Kernels, importlib.import_module("._native", __name__))
    except ImportError:
        return None


NATIVE = _native()
"""The kernels in C++ (native/); None if the package was built without a compiler."""
KERNELS: Kernels = NATIVE or NumpyKernels()
"""The fastest kernels of this machine."""

__all__ = ["CHUNK", "KERNELS", "NATIVE", "CandidateBuffer", "Kernels", "NumpyKernels"]

"""The loops over many elements: in C++ if the extension was built, in NumPy otherwise."""

import importlib
import logging
from typing import cast

from .numpy_kernels import CHUNK, LEVELS, CandidateBuffer, HalfBits, NumpyKernels, Words

Kernels = NumpyKernels
"""The interface: what the extension has, too."""
NATIVE: Kernels | None
"""The kernels in C++ (native/); None if the package was built without a compiler."""
try:
    NATIVE = cast(Kernels, importlib.import_module("._native", __name__))
except ModuleNotFoundError:
    NATIVE = None
except ImportError as error:
    NATIVE = None
    logging.getLogger("horovod_oktopk").warning(
        "the kernels in C++ were built, but cannot be loaded here (%s): install this package again, on this machine",
        error)
KERNELS = NATIVE or NumpyKernels()
"""The fastest kernels of this machine."""
SLOW = ("a step takes three to four times as long as with the kernels in C++: install a C++ compiler (g++), and this "
        "package again")
"""The remedy for kernels in NumPy."""

__all__ = ["CHUNK", "KERNELS", "LEVELS", "NATIVE", "SLOW", "CandidateBuffer", "HalfBits", "Kernels", "NumpyKernels",
           "Words"]

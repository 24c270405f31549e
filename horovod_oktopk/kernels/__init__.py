"""The loops over many elements: in C++ where the extension was built, in NumPy elsewhere, with the same bits."""

from .native_kernels import AVAILABLE, NativeKernels
from .numpy_kernels import NumpyKernels
from .protocol import CHUNK, CandidateBuffer, Kernels

KERNELS: Kernels = NativeKernels() if AVAILABLE else NumpyKernels()
"""The fastest that there are here."""

__all__ = ["CHUNK", "KERNELS", "CandidateBuffer", "Kernels", "NativeKernels", "NumpyKernels"]

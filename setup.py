"""What pyproject.toml cannot say: the kernels in C++."""

from pathlib import Path

from setuptools import setup

try:
    from pybind11.setup_helpers import Pybind11Extension
except ImportError:  # then the package works with NumPy alone
    Pybind11Extension = None

KERNELS = "horovod_oktopk/kernels/native"


def extensions() -> list:
    """Return the kernels in C++; they are optional: a machine without a compiler installs the package, too."""
    if Pybind11Extension is None:
        return []
    # No contraction: a fused multiply-add would round differently from NumPy.
    headers = sorted(map(str, Path(KERNELS).glob("*.hpp")))
    return [Pybind11Extension("horovod_oktopk.kernels._native", [f"{KERNELS}/bindings.cpp"], depends=headers,
                              cxx_std=17, optional=True,
                              extra_compile_args=["-O3", "-ffp-contract=off"])]


setup(ext_modules=extensions())

"""What pyproject.toml cannot say: the kernels in C++."""

import shutil
from pathlib import Path

from setuptools import setup

try:
    from pybind11.setup_helpers import Pybind11Extension
except ImportError:  # then the package works with NumPy alone
    Pybind11Extension = None
from setuptools.command.build_ext import build_ext

KERNELS = "horovod_oktopk/kernels/native"


class BuildInBothPlaces(build_ext):
    """Leaves the kernels in the checkout, too: a program that is started there finds the package there."""

    def run(self):
        super().run()
        for each in () if self.inplace else self.extensions:
            built = Path(self.get_ext_fullpath(each.name))
            if built.is_file():
                shutil.copy(built, (Path(__file__).parent / KERNELS).parent)


def extensions() -> list:
    """Return the kernels in C++; they are optional: a machine without a compiler installs the package, too."""
    if Pybind11Extension is None:
        return []
    # No contraction: a fused multiply-add would round differently from NumPy.
    headers = sorted(map(str, Path(KERNELS).glob("*.hpp")))
    return [Pybind11Extension("horovod_oktopk.kernels._native", [f"{KERNELS}/bindings.cpp"], depends=headers,
                              cxx_std=17, optional=True,
                              extra_compile_args=["-O3", "-ffp-contract=off"])]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildInBothPlaces})

"""Packaging. ``integrations/<framework>`` is installed as ``horovod_oktopk.<framework>``."""

from pathlib import Path

from setuptools import setup

try:
    from pybind11.setup_helpers import Pybind11Extension
except ImportError:  # then the package works with NumPy alone
    Pybind11Extension = None

HERE = Path(__file__).parent

PACKAGES = {
    "horovod_oktopk": "horovod_oktopk",
    "horovod_oktopk.kernels": "horovod_oktopk/kernels",
    "horovod_oktopk.vectors": "horovod_oktopk/vectors",
    "horovod_oktopk.selection": "horovod_oktopk/selection",
    "horovod_oktopk.phases": "horovod_oktopk/phases",
    "horovod_oktopk.schemes": "horovod_oktopk/schemes",
    "horovod_oktopk.advise": "horovod_oktopk/advise",
    "horovod_oktopk.partial": "horovod_oktopk/partial",
    "horovod_oktopk.step_ahead": "horovod_oktopk/step_ahead",
    "horovod_oktopk.reducer": "horovod_oktopk/reducer",
    "horovod_oktopk.transport": "horovod_oktopk/transport",
    "horovod_oktopk.torch": "integrations/torch",
    "horovod_oktopk.tensorflow": "integrations/tensorflow",
    "horovod_oktopk.tensorflow.keras": "integrations/tensorflow/keras",
}

KERNELS = "horovod_oktopk/kernels/native"


def extensions() -> list:
    """The kernels in C++; optional, so that a machine without a compiler installs the package all the same."""
    if Pybind11Extension is None:
        return []
    # No contraction: a fused multiply-add would round differently from NumPy.
    headers = sorted(map(str, Path(KERNELS).glob("*.hpp")))
    return [Pybind11Extension("horovod_oktopk.kernels._native", [f"{KERNELS}/bindings.cpp"], depends=headers,
                              cxx_std=17, optional=True,
                              extra_compile_args=["-O3", "-ffp-contract=off"])]


setup(
    name="horovod_oktopk",
    version="0.1.0",
    description="O(k) sparse gradient allreduce (Ok-Topk) as a compression option for Horovod",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    ext_modules=extensions(),
    package_data={"horovod_oktopk": ["py.typed"], "horovod_oktopk.torch": ["py.typed"],
                  "horovod_oktopk.tensorflow": ["py.typed"]},
    install_requires=["numpy>=1.24"],
    extras_require={
        "mpi": ["mpi4py>=4.0"],
        # Without Horovod: pip would compile it, which takes care: see scripts/environment.sh.
        "torch": ["torch>=2.3"],
        "tensorflow": ["tensorflow>=2.16,<2.19"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)

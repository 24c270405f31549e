"""Packaging. ``integrations/<framework>`` is installed as ``horovod_oktopk.<framework>``."""

from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent

PACKAGES = {
    "horovod_oktopk": "horovod_oktopk",
    "horovod_oktopk.common": "horovod_oktopk/common",
    "horovod_oktopk.core": "horovod_oktopk/core",
    "horovod_oktopk.transport": "horovod_oktopk/transport",
    "horovod_oktopk.torch": "integrations/torch",
    "horovod_oktopk.tensorflow": "integrations/tensorflow",
    "horovod_oktopk.tensorflow.keras": "integrations/tensorflow/keras",
}

setup(
    name="horovod_oktopk",
    version="0.1.0",
    description="O(k) sparse gradient allreduce (Ok-Topk) as a compression option for Horovod",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    package_data={"horovod_oktopk": ["py.typed"], "horovod_oktopk.torch": ["py.typed"],
                  "horovod_oktopk.tensorflow": ["py.typed"]},
    install_requires=["numpy>=1.24"],
    extras_require={
        "mpi": ["mpi4py>=4.0"],
        "torch": ["torch>=2.3", "horovod>=0.28.1,<0.29", "mpi4py>=4.0"],
        "tensorflow": ["tensorflow>=2.16,<2.19", "horovod>=0.28.1,<0.29", "mpi4py>=4.0"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)

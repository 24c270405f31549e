"""Modules that importing the package loads. Who imports whom is in pyproject.toml, and `make lint` checks it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "tensorflow", "keras", "tf_keras", "horovod", "mpi4py"}


def test_importing_the_package_loads_no_framework_and_no_mpi():
    code = f"import sys, horovod_oktopk; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

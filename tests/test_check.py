"""`python -m horovod_oktopk check`, in an environment that has everything."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launch import environment

pytestmark = pytest.mark.launches


def test_every_part_of_this_environment_is_found() -> None:
    done = subprocess.run([sys.executable, "-m", "horovod_oktopk", "check"], env=environment(), capture_output=True,
                          text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines() if line.startswith("    ")]
    assert [line for line in lines if not line.startswith("[X]") and "CUDA" not in line] == []
    for part in ("Kernels: C++", "Horovod: 0.28", "PyTorch: PyTorch 2", "with Keras 3", "MPI: Open MPI", "Gloo:"):
        assert any(part in line for line in lines), (part, lines)
    assert done.stdout.endswith("OkTopk can be used here.\n")

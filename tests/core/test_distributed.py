"""Ranks that Horovod knows nothing of: torchrun starts them, and training has the same bits."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.core.test_digests import DIGESTS
from tests.launch import ROOT, environment

CASES = {2: ["OkTopk", "OkTopk log4", "GTopk tree", "StepAhead", "StepAhead gain auto"],
         4: ["OkTopk hosts", "StepAhead"]}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_bits_are_those_of_threads(size: int) -> None:
    job = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}",
                          "-m", "tests.core.distributed", *CASES[size]], cwd=ROOT, env=environment(), text=True,
                         capture_output=True, timeout=200, check=False)
    assert job.returncode == 0, job.stderr[-4000:]
    found = json.loads(job.stdout.partition("digests:")[2])
    assert found == {name: DIGESTS[f"{name} on {size}"] for name in CASES[size]}

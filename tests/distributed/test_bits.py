"""A training has the same bits whatever has started its ranks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.bits import CASES
from tests.launch import horovodrun, torchrun

LAUNCHERS = {"torchrun": torchrun, "MPI": partial(horovodrun, "mpi"), "Gloo": partial(horovodrun, "gloo")}


@pytest.mark.slow
def test_torchrun_and_both_networks_of_horovodrun_give_the_same_bits(tmp_path: Path) -> None:
    found = {}
    for name, launch in LAUNCHERS.items():
        job = launch(4, "-m", "tests.distributed.bits", str(tmp_path / name))
        assert job.returncode == 0, job.output[-4000:]
        found[name] = json.loads((tmp_path / name).read_text())
    assert set(found["torchrun"]) == set(CASES)
    assert found["MPI"] == found["Gloo"] == found["torchrun"]
    assert len(set(found["torchrun"].values())) == len(CASES)

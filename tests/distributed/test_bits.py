"""A training has the same bits whatever has started its ranks."""

from __future__ import annotations

import json

import pytest

from tests.distributed.bits import CASES
from tests.launch import Finished, horovodrun, torchrun


def digests(job: Finished) -> dict[str, str]:
    assert job.returncode == 0, job.output[-4000:]
    found: dict[str, str] = json.loads(job.output.partition("digests:")[2].splitlines()[0])
    assert set(found) == set(CASES)
    return found


@pytest.mark.slow
def test_torchrun_and_both_networks_of_horovodrun_give_the_same_bits() -> None:
    ours = digests(torchrun(4, "-m", "tests.distributed.bits"))
    assert ours == digests(horovodrun("mpi", 4, "-m", "tests.distributed.bits"))
    assert ours == digests(horovodrun("gloo", 4, "-m", "tests.distributed.bits"))
    assert len(set(ours.values())) == len(ours)

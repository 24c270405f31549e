"""Two optimizers with StepAhead take their steps in one `tf.function`; a job of its own, with a loop of its own."""

from __future__ import annotations

import re

import pytest

from tests.launch import horovodrun


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "legacy"), [("mpi", "0"), ("gloo", "1")], ids=["mpi-keras3", "gloo-tf_keras"])
def test_all_ranks_share_the_same_bits_of_both_models(backend: str, legacy: str) -> None:
    job = horovodrun(backend, 2, "-m", "tests.tensorflow.dcgan_worker", extra={"TF_USE_LEGACY_KERAS": legacy})
    assert job.returncode == 0, job.output[-5000:]
    shared = re.findall(r"shares ([0-9a-f]{16}); its losses are finite", job.output)
    assert len(shared) == 2, job.output[-5000:]
    assert shared[0] == shared[1]

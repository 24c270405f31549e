"""A rank that dies ends the job, or an elastic job goes on without it; nothing hangs. In both frameworks.

Each is a launch of its own, so `make test` has one of them. test_endings.py has ranks that raise an error.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.launch import Finished, horovodrun

TF_KERAS = {"TF_USE_LEGACY_KERAS": "1"}
HOROVOD_GAVE_UP = "http_store.cc:54] Wait timeout after 30 seconds"
"""Horovod's own words where a worker came too late, on a busy machine, to start anew with the others."""


@pytest.mark.parametrize(("worker", "backend"), [
    ("torch.faulty", "mpi"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("torch.faulty", "gloo"), ("tensorflow.faulty", "gloo"), ("torch.partial", "mpi")))])
def test_the_job_ends_with_an_error_when_a_rank_is_killed(worker: str, backend: str) -> None:
    job = horovodrun(backend, 2, "-m", f"tests.{worker}_worker", "killed", timeout=100)
    assert job.returncode > 0, job.output[-3000:]
    assert job.output.count("has reached step 3") == 2, job.output[-3000:]


@pytest.mark.slow
def test_ranks_that_go_on_without_one_that_has_ended_are_told() -> None:
    job = horovodrun("mpi", 3, "-m", "tests.torch.partial_worker", "ending", timeout=100)
    assert job.returncode > 0, job.output[-3000:]
    assert "ranks [2] have ended" in job.output, job.output[-3000:]
    assert job.output.count("has come to its end") == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["shutdown", "unsynchronized"])
def test_a_job_of_partial_rounds_ends_well_with_rounds_pending(how: str) -> None:
    job = horovodrun("mpi", 2, "-m", "tests.torch.partial_worker", how, timeout=100)
    assert job.returncode == 0, job.output[-3000:]
    assert job.output.count("has come to its end") == 2
    assert job.output.count("keeps 0 elements that were in no round") == (2 if how == "shutdown" else 0)


@pytest.mark.slow
@pytest.mark.timeout(500)  # of two launches
@pytest.mark.xdist_group("elastic")  # they mostly wait, and groups begin first, beside others
@pytest.mark.parametrize(("framework", "mode", "variables"), [
    pytest.param("torch", "gradients", {}, id="torch"), pytest.param("torch", "step_ahead", {}, id="step_ahead"),
    pytest.param("tensorflow", "step_ahead", {}, id="keras3-step_ahead"),
    pytest.param("tensorflow", "gradients", TF_KERAS, id="tf_keras")])
def test_an_elastic_job_goes_on_when_a_worker_is_killed_and_another_joins(
        framework: str, mode: str, variables: dict[str, str], tmp_path: Path) -> None:
    def launch(folder: Path) -> Finished:
        folder.mkdir()
        hosts = folder / "hosts.sh"
        hosts.write_text(f"#!/bin/sh\n[ -e {folder}/killed ] && echo localhost:3 || echo localhost:2\n"
                         "echo 127.0.0.1:1\n")
        hosts.chmod(0o755)
        return horovodrun("gloo", 3, "-m", f"tests.{framework}.elastic_worker", str(folder), mode, timeout=200,
                          flags=("--min-np", "2", "--max-np", "3", "--host-discovery-script", str(hosts)),
                          extra=variables)

    folder = tmp_path / "first"
    job = launch(folder)
    if HOROVOD_GAVE_UP in job.output and not (folder / "outcome.json").exists():
        warnings.warn("Horovod gave up before all workers had come back; the job is launched again", stacklevel=1)
        folder = tmp_path / "second"
        job = launch(folder)
    outcome = folder / "outcome.json"
    assert outcome.exists(), job.output[-5000:]
    everyone = json.loads(outcome.read_text())
    assert (folder / "killed").exists()
    assert [worker["size"] for worker in everyone] == [3, 3, 3], "nobody took the killed worker's place"
    assert {worker["step"] for worker in everyone} == {12}, "the newcomer did not take the counter of rank 0"
    assert all(worker["weight"] == everyone[0]["weight"] for worker in everyone), "the replicas differ"
    assert "different learning rates" not in job.output, "all have the same"
    if mode == "gradients":  # integers: exact
        lost = json.loads((folder / "killed").read_text())
        held = np.sum([lost, *(worker["residual"] for worker in everyone)], 0)
        accounted = held - everyone[0]["weight"]
        assert np.array_equal(accounted, everyone[0]["computed"]), "a gradient is lost, or there twice"

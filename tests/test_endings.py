"""However a rank ends, the others are told, over MPI which one; whoever is waited for is named. Nothing hangs."""

from __future__ import annotations

import re
import time

import pytest

from horovod_oktopk.transport.ending import LEFT
from horovod_oktopk.transport.horovod import explain
from tests.launch import Finished, horovodrun

WAYS = {"normal": "has come to the end of its program", "exiting with 3": "has ended by sys.exit(3)",
        "raising": "has ended with ValueError: the file is gone", "shutdown": "has called hvd.shutdown()"}


def job_of(framework: str, backend: str, how: str, size: int = 2, **variables: str) -> Finished:
    return horovodrun(backend, size, "-m", "tests.ending_worker", framework, how, timeout=200, extra=variables)


def told(job: Finished) -> dict[int, str]:
    """Return what each rank printed that it was told; two may have printed into one line."""
    found = re.findall(r"rank (\d+) was told: ((?:(?!rank \d+ was told).)*)", job.output)
    return {int(rank): text for rank, text in found}


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "backend", "how"), [
    *(("torch", "mpi", how) for how in WAYS),
    ("torch", "gloo", "raising"), ("partial", "mpi", "raising"), ("step_ahead", "mpi", "raising"),
    ("step_ahead", "gloo", "shutdown"), ("tensorflow", "mpi", "raising"), ("tensorflow", "gloo", "shutdown"),
    ("hosts", "mpi", "raising")])
def test_the_ranks_that_go_on_are_told_which_rank_has_ended_and_how(framework: str, backend: str, how: str) -> None:
    """With two hosts, a rank of the first one communicates with the one that ends through others alone."""
    last = 3 if framework == "hosts" else 1
    job = job_of(framework, backend, how, size=last + 1)
    heard = told(job)
    assert sorted(heard) == [*range(last)], job.output[-4000:]
    expected = f"rank {last} {WAYS[how]}" if backend == "mpi" else "rank has left the job"
    assert all(expected in text for text in heard.values()), heard
    assert (job.returncode == 0) == (how not in ("raising", "exiting with 3")), job.output[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "backend", "how", "size", "variables"), [
    pytest.param("open", "mpi", "even", 2, {}, id="inside shared_parameters"),
    pytest.param("torch", "gloo", "again", 2, {}, id="Horovod is started again"),
    pytest.param("step_ahead", "gloo", "again", 2, {}, id="Horovod is shut down while an exchange is under way"),
    pytest.param("torch", "mpi", "stalling", 2, {"STALL": "3", "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
                                                 "HOROVOD_STALL_CHECK_DISABLE": "1"}, id="no stall check")])
def test_a_job_ends_well_and_nobody_is_named(framework: str, backend: str, how: str, size: int,
                                             variables: dict[str, str]) -> None:
    job = job_of(framework, backend, how, size, **variables)
    if how == "again" and "gloo::IoException" in job.output:  # seen once, on a busy machine, within hvd.init
        job = job_of(framework, backend, how, size, **variables)
    assert job.returncode == 0, job.output[-4000:]
    assert job.output.count("has come to its end") == size
    assert told(job) == {}
    assert "stalled" not in job.output


@pytest.mark.slow
def test_who_is_waited_for_is_named_and_in_the_end_given_up() -> None:
    job = job_of("torch", "mpi", "stalling", size=3, STALL="10", HOROVOD_STALL_CHECK_TIME_SECONDS="1",
                 HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="5")
    assert re.search(r"stalled: rank 0 has waited for \d+ s for ranks \[2\] to come to a reduction", job.output), (
        job.output[-4000:])
    heard = told(job)
    assert sorted(heard) == [0, 1, 2], job.output[-4000:]
    assert any("for ranks [2] to come" in text and "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is 5" in text
               for text in heard.values()), heard


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "how"), [("torch", "frozen"), ("partial", "frozen"),
                                                ("torch", "frozen at the end")])
def test_a_job_ends_that_has_given_up_a_rank_which_stands_still(framework: str, how: str) -> None:
    """Horovod's own shutdown would wait for it for ever."""
    job = job_of(framework, "mpi", how, HOROVOD_STALL_CHECK_TIME_SECONDS="1",
                 HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="4")
    assert job.returncode > 0, job.output[-4000:]
    assert ("rank 1 does not answer" in job.output) == (how == "frozen"), job.output[-4000:]
    assert "ends the whole job" in job.output or "ends the job" in job.output, job.output[-4000:]


@pytest.mark.parametrize(("framework", "backend", "how"), [
    ("torch", "mpi", "terminated"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("torch", "mpi", "interrupted"), ("keras", "mpi", "terminated"), ("keras", "gloo", "interrupted")))])
def test_a_job_ends_soon_that_is_interrupted_or_has_a_rank_terminated(framework: str, backend: str, how: str) -> None:
    """Schedulers send SIGTERM to one rank, and a terminal SIGINT to the launcher and all in its group."""
    job = job_of(framework, backend, how)
    ended = time.time()
    sent = re.search(r"the signal was sent at ([\d.]+)\.", job.output)
    assert sent, job.output[-4000:]
    assert job.returncode != 0, job.output[-4000:]
    assert ended - float(sent[1]) < 20
    assert "has come to its end" not in job.output


@pytest.mark.slow
def test_where_horovod_is_started_again_over_mpi_its_own_error_ends_the_job() -> None:
    """MPI starts once in a process, so stock Horovod cannot be started again there either."""
    job = job_of("torch", "mpi", "again")
    assert job.returncode > 0, job.output[-4000:]
    assert "called after MPI_FINALIZE" in job.output, job.output[-4000:]


def test_over_horovods_collectives_an_error_says_that_a_rank_has_left() -> None:
    text = "Horovod has been shut down. This was caused by ..."
    assert explain(OSError(text)) == f"{LEFT}. {text}"
    assert explain(OSError("cut off")) == "cut off"

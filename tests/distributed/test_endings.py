"""However a rank ends under torchrun, the others say which one and how; nothing hangs, and restarts resume."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from horovod_oktopk import OptionError
from horovod_oktopk.distributed.notes import STALL_SECONDS, stall_seconds
from tests.launch import Finished, torchrun

WAYS = {"raising": "rank 2 has ended with ValueError: the file is gone",
        "fewer": "rank 2 has come to the end of its program", "destroying": "rank 2 has ended with TransportError"}


@pytest.mark.parametrize("wrong", ["", "soon", "nan", "-1"])
def test_seconds_of_a_stall_must_be_a_number(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STALL_SECONDS, wrong)
    with pytest.raises(OptionError, match=f"must be a number of seconds, 0 or more; got '{wrong}'"):
        stall_seconds()


def job_of(how: str, folder: Path, mode: str = "gradients", flags: tuple[str, ...] = (),
           **variables: str) -> Finished:
    return torchrun(3, "-m", "tests.distributed.ending_worker", how, str(folder), mode, timeout=120, flags=flags,
                    extra=variables)


def told(job: Finished) -> dict[int, str]:
    return {int(rank): text for rank, text in re.findall(r"rank (\d+) was told: (.*)", job.output)}


def digests(job: Finished) -> set[str]:
    found = re.findall(r"rank \d+ digest: (\w+)", job.output)
    assert len(found) == 3, job.output[-4000:]
    return set(found)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "mode"), [*((how, "gradients") for how in WAYS), ("raising", "step_ahead")])
def test_the_others_are_told_which_rank_has_ended_and_how(how: str, mode: str, tmp_path: Path) -> None:
    """Torchrun may end a rank before it can say what it was told, so that one of two is enough."""
    job = job_of(how, tmp_path, mode)
    heard = told(job)
    assert job.returncode != 0
    assert {*heard} & {0, 1}, job.output[-4000:]
    assert all(WAYS[how] in text for rank, text in heard.items() if rank < 2), heard
    if how == "destroying":
        assert "call dist.destroy_process_group after the last step" in heard[2]


@pytest.mark.slow
def test_a_rank_that_is_late_is_named_and_the_job_goes_on(tmp_path: Path) -> None:
    job = job_of("stalling", tmp_path, OKTOPK_STALL_SECONDS="2")
    assert job.returncode == 0, job.output[-4000:]
    assert re.search(r"stalled: ranks \[0, 1\] have waited for \d+ s for ranks \[2\]", job.output), job.output[-4000:]
    assert len(digests(job)) == 1


@pytest.mark.slow
def test_a_restart_by_torchrun_goes_on_from_the_saved_state(tmp_path: Path) -> None:
    """Ask torchrun for a new store: in its usual one PyTorch's own process group finds the old ranks' addresses."""
    (tmp_path / "well").mkdir()
    undisturbed = digests(job_of("well", tmp_path / "well", "step_ahead"))
    job = job_of("restarting", tmp_path, "step_ahead", flags=("--max-restarts", "1"),
                 TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert job.returncode == 0, job.output[-4000:]
    assert digests(job) == undisturbed
    assert len(undisturbed) == 1

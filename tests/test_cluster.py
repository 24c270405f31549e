"""The cluster of network namespaces: it runs, it says what is wrong, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import balance, scaling
from horovod_oktopk import SameBlocks
from horovod_oktopk.modes.auto_density import COUNTED, SKIPPED
from tests.launch import ROOT, environment

PROBE = "oktopk-probe"
pytestmark = [pytest.mark.usefixtures("network_namespaces"), pytest.mark.xdist_group("cluster")]


@pytest.fixture(scope="session")
def network_namespaces() -> None:
    """Skip if this machine does not let us make hosts."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"there is no {' and no '.join(missing)}: iproute2 is not installed")
    made = subprocess.run(["ip", "netns", "add", PROBE], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", PROBE], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"this machine makes no network namespaces: {made.stderr.strip()}")


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    # A shell that starts tests in the background has them, and all that they start, ignore Ctrl-C.
    return subprocess.Popen([sys.executable, "-m", f"benchmarks.cluster.{program}", *arguments], cwd=ROOT,
                            env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def outputs(folder: Path) -> list[str]:
    return ["--json", str(folder / "out.json"), "--plot", str(folder / "out.png")]


def measured(program: str, folder: Path, line: str) -> Any:
    """Return what a run writes, which draws a plot too and leaves nothing behind."""
    job = start(program, *shlex.split(line), *outputs(folder))
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    assert (folder / "out.png").stat().st_size > 0
    assert left_behind(job) == []
    return json.loads((folder / "out.json").read_text())


def left_behind(job: subprocess.Popen[str]) -> list[str]:
    """Return namespaces and devices of the clusters that this job made."""
    listed = [subprocess.run(["ip", *command], capture_output=True, text=True, check=True).stdout.splitlines()
              for command in (["netns", "list"], ["-o", "link"])]
    return [line for lines in listed for line in lines if re.search(rf"\bok{job.pid}[-bv]", line)]


def test_a_small_cluster_measures_time_and_bytes(tmp_path: Path) -> None:
    line = "--hosts 3 --rate 1gbit --parameters 300000 --steps 2 --schemes OkTopk"
    (found,) = measured("compare", tmp_path, line)["results"]
    assert found["ranks"] == 3
    assert found["seconds"] > 0
    assert 0.9 * found["bytes_sent"] < found["interface_bytes"] < 1.5 * found["bytes_sent"] + 20_000


def test_ranks_of_a_host_share_its_link(tmp_path: Path) -> None:
    """Its interface carries what both send, but not what they send each other."""
    line = "--hosts 2 --ranks-per-host 2 --parameters 300000 --steps 2 --schemes TopkA"
    (found,) = measured("compare", tmp_path, line)["results"]
    assert (found["hosts"], found["ranks"]) == (2, 4)
    assert 0.5 * found["bytes_sent"] < found["interface_bytes"] < 1.5 * found["bytes_sent"]


def test_sizes_are_compared_with_dense(tmp_path: Path) -> None:
    found = measured("sizes", tmp_path, "--hosts 2 --sizes 1000 20000 --few-from 1 --steps 2")
    assert {(r["n"], r["scheme"]) for r in found} == {(n, scheme) for n in (1000, 20000) for scheme in
                                                      ("Horovod dense", "OkTopk")}
    assert all(len(r["seconds"]) == 1 and r["seconds"][0] > 0 for r in found)


def test_training_steps_are_split_into_their_parts(tmp_path: Path) -> None:
    line = "--hosts 2 --models transformer --schemes Dense OkTopk --warm-up 1 --steps 1"
    dense, oktopk, ring = measured("training", tmp_path, line)
    assert (dense["scheme"], ring["scheme"], oktopk["scheme"]) == ("Dense", "Dense, ring", "OkTopk")
    for found in (dense, ring, oktopk):
        assert found["step"] == pytest.approx(found["computation"] + found["sparsification"] + found["communication"])
        assert found["computation"] > 0
    assert dense["sparsification"] == 0 < oktopk["sparsification"]
    assert 0 < oktopk["bytes_sent"] < 4 * 10_769_792 * 0.01 * 3 * 1.1  # 6k(P-1)/P words, and control messages


def test_a_density_that_sets_itself_is_found_before_steps_are_timed(tmp_path: Path) -> None:
    line = '--hosts 2 --models gpt --schemes "StepAhead(SameBlocks), auto" --steps 1'
    (found,) = measured("training", tmp_path, line)
    assert min(abs(found["density"] / each - 1) for each in SameBlocks.densities) < 1e-4  # k is a whole number
    assert found["found_after"] >= SKIPPED + COUNTED
    elements = found["density"] * 812_160  # 2k(P-1)/P values of 4.25 bits, and control messages
    assert found["bytes_sent"] == pytest.approx(elements * 4.25 / 8, rel=0.02)


def test_equal_regions_receive_more_if_selections_crowd_together(tmp_path: Path) -> None:
    found = balance.measure(lambda items, _text: items, hosts=4, n=200_000, steps=2)
    words = {(r["case"], r["split"]): r["split_words"] / r["k"] for r in found["results"]}
    assert words["crowded", "naive"] > 1.15 * words["crowded", "balanced"]
    assert words["even", "naive"] < 1.1 * words["even", "balanced"]
    assert [row[:2] for row in balance.rows(found)[1:]] == [list(key) for key in words]
    balance.plot(found, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 0


def test_parallel_efficiency_is_computation_over_the_step(tmp_path: Path) -> None:
    found = scaling.measure(lambda items, _text: items, hosts=(2,), schemes=("OkTopk",), model="transformer",
                            warm_up=1, steps=1)
    (oktopk,) = found["results"]
    assert scaling.efficiency(found, oktopk) == oktopk["computation_alone"] / oktopk["step"] > 0
    assert 0 < oktopk["bytes_sent"] < 4 * 10_769_792 * 0.01 * 3 * 1.1  # 6k(P-1)/P words, and control messages
    assert scaling.rows(found)[1][:2] == ["2", "OkTopk"]
    scaling.plot(found, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 0


@pytest.mark.parametrize("how", ["fails", "is interrupted", "is terminated"])
def test_nothing_is_left_behind_when_a_run(how: str, tmp_path: Path) -> None:
    limit = "1" if how == "fails" else "100"
    job = start("compare", "--hosts", "2", "--parameters", "3000000", "--steps", "500", "--schemes", "TopkA",
                "--timeout", limit, *outputs(tmp_path))
    if how != "fails":
        deadline = time.monotonic() + 30
        while not left_behind(job):
            assert time.monotonic() < deadline, "there is no cluster"
            time.sleep(0.1)
        time.sleep(1)
        job.send_signal(signal.SIGINT if how == "is interrupted" else signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert left_behind(job) == [], output

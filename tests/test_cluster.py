"""The cluster of network namespaces: it runs, it says what is wrong, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch import ROOT, environment

CLUSTER, TRAINING, SIZES = (f"benchmarks.cluster.{name}" for name in ("compare", "training", "sizes"))


def can_make_hosts() -> bool:
    """Whether this machine lets us make a network namespace at all."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "oktopk-probe"], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", "oktopk-probe"], capture_output=True, check=False)
    return made


needs_root = pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root and iproute2")


def start(*arguments: str, script: str = CLUSTER) -> subprocess.Popen[str]:
    # A shell that starts tests in the background has them, and all that they start, ignore Ctrl-C.
    return subprocess.Popen([sys.executable, "-m", script, *arguments], cwd=ROOT, env=environment(), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def left_behind() -> list[str]:
    """Namespaces and devices of clusters."""
    listed = [subprocess.run(["ip", *command], capture_output=True, text=True, check=True).stdout.splitlines()
              for command in (["netns", "list"], ["-o", "link"])]
    return [line for lines in listed for line in lines if line.startswith("ok") or ": ok" in line]


@needs_root
def test_a_small_cluster_measures_time_and_bytes(tmp_path: Path) -> None:
    job = start("--hosts", "3", "--rate", "1gbit", "--parameters", "300000", "--steps", "2", "--schemes", "OkTopk",
                "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"))
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    (found,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert found["ranks"] == 3
    assert found["seconds"] > 0
    assert 0.9 * found["bytes_sent"] < found["interface_bytes"] < 1.5 * found["bytes_sent"] + 20_000
    assert (tmp_path / "out.png").stat().st_size > 0
    assert left_behind() == []


@needs_root
def test_sizes_are_compared_with_dense(tmp_path: Path) -> None:
    job = start("--hosts", "2", "--sizes", "1000", "20000", "--few-from", "1", "--steps", "2", "--json",
                str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"), script=SIZES)
    output, _ = job.communicate(timeout=180)
    assert job.returncode == 0, output
    found = json.loads((tmp_path / "out.json").read_text())
    assert {(r["n"], r["scheme"]) for r in found} == {(n, scheme) for n in (1000, 20000) for scheme in
                                                      ("Horovod dense", "OkTopk", "OkTopk, auto")}
    assert all(len(r["seconds"]) == 1 and r["seconds"][0] > 0 for r in found)
    assert (tmp_path / "out.png").stat().st_size > 0
    assert left_behind() == []


@needs_root
def test_training_steps_are_split_into_their_parts(tmp_path: Path) -> None:
    job = start("--hosts", "2", "--models", "transformer", "--schemes", "Dense", "OkTopk", "--warm-up", "1",
                "--steps", "1", "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"),
                script=TRAINING)
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    dense, ring, oktopk = json.loads((tmp_path / "out.json").read_text())
    assert (dense["scheme"], ring["scheme"], oktopk["scheme"]) == ("Dense", "Dense, ring", "OkTopk")
    for found in (dense, ring, oktopk):
        assert found["step"] == pytest.approx(found["computation"] + found["sparsification"] + found["communication"])
        assert found["computation"] > 0
    assert dense["sparsification"] == 0 < oktopk["sparsification"]
    assert 0 < oktopk["bytes_sent"] < 4 * 10_769_792 * 0.01 * 3 * 1.1  # 6k(P-1)/P words, and control messages
    assert (tmp_path / "out.png").stat().st_size > 0


def test_bad_input_is_told_before_training() -> None:
    job = start("--hosts", "65", script=TRAINING)
    output, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert "--hosts must be from 2 to 64; got 65" in output or "need root" in output


@needs_root
@pytest.mark.parametrize("how", ["fails", "is interrupted", "is terminated"])
def test_nothing_is_left_behind_when_a_run(how: str, tmp_path: Path) -> None:
    limit = "1" if how == "fails" else "100"
    job = start("--hosts", "2", "--parameters", "3000000", "--steps", "500", "--schemes", "TopkA", "--timeout", limit,
                "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"))
    if how != "fails":
        deadline = time.monotonic() + 30
        while not left_behind():
            assert time.monotonic() < deadline, "there is no cluster"
            time.sleep(0.1)
        time.sleep(1)
        job.send_signal(signal.SIGINT if how == "is interrupted" else signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert left_behind() == [], output


@pytest.mark.parametrize(("arguments", "message"), [
    (["--hosts", "1"], "--hosts must be from 2 to 64"), (["--rate", "fast"], "--rate must be such as 100mbit"),
    (["--rate", "0mbit"], "--rate must be"), (["--parameters", "1000000000000"], "GiB are free"),
    (["--schemes", "Topk"], "invalid choice"), (["--density", "0"], "--density must be in (0, 1]; got 0.0"),
    (["--gradients", "nowhere.npy"], "there is no file nowhere.npy"), (["--sweep", "--hosts", "99"], "got 99")])
def test_bad_input_is_told(arguments: list[str], message: str) -> None:
    job = start(*arguments)
    output, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert message in output or (os.geteuid() != 0 and "need root" in output)

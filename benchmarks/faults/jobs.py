"""Runs one plan as a real job, and says what came of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import launch
from benchmarks.faults.inject import TIME
from benchmarks.faults.plans import STALL_SHUTDOWN, Plan
from benchmarks.faults.rank import PLAN

BLAMED = re.compile(r"rank (\d+) has (?:come to the end|ended|called hvd\.shutdown)|for ranks \[([\d, ]+)\] to come")


SILENT = ("none", "fewer", "nan", "options")
"""Faults of which no time is noted."""


@dataclass(frozen=True)
class Ended:
    """A job that has ended, or was ended.

    ranks: the report of each rank that came to its end. crashes: ranks that died of a signal of their own. happened:
    true if the fault came. seconds: from the fault to the end.
    """

    plan: Plan
    in_time: bool
    returncode: int
    ranks: dict[int, dict[str, Any]]
    crashes: list[int]
    left_over: int
    happened: bool
    seconds: float
    output: str


def run(plan: Plan, limit: float) -> Ended:
    """Start the job, and wait for its end. limit: seconds after which it counts as hung."""
    with tempfile.TemporaryDirectory(prefix="faults.") as name:
        folder = Path(name)
        (folder / PLAN).write_text(json.dumps(asdict(plan)))
        launcher = (launch.torchrun(plan.ranks) if plan.network == "torchrun"
                    else launch.horovodrun(plan.ranks, plan.network))
        command = [*launcher, sys.executable, "-m", "benchmarks.faults.rank", name]
        in_time = True
        with (folder / "output").open("w+") as output, subprocess.Popen(
                command, env=_environment(plan), cwd=launch.ROOT, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True) as job:
            try:
                job.wait(limit)
            except subprocess.TimeoutExpired:
                in_time = False
            ended = time.time()
            left_over = _kill_all_with(name) if in_time else 0
            if not in_time:
                job.terminate()
                _kill_all_with(name)
                os.killpg(job.pid, signal.SIGKILL)
        fault = folder / TIME
        return Ended(plan, in_time, job.returncode, _told(folder),
                     [int(each.suffix[1:]) for each in folder.glob("crash.*") if each.stat().st_size], left_over,
                     fault.exists() or plan.fault in SILENT, ended - fault.stat().st_mtime if fault.exists() else 0.0,
                     (folder / "output").read_text(errors="replace"))


def faults_of(ended: Ended, reference: Ended | None) -> list[str]:
    """Return all that is not as promised; [] if all is well. reference: the same program, undisturbed."""
    if not ended.in_time:
        return ["hangs"]
    if not ended.happened:
        return [f"failed before the fault ({ended.returncode}): {ended.output[-500:]}"]
    found = [f"rank {rank} crashed" for rank in ended.crashes]
    if ended.left_over:
        found.append(f"{ended.left_over} processes left over")
    return found + (_wrong_results(ended, reference) if ended.plan.goes_on else _wrong_ends(ended))


def _wrong_results(ended: Ended, reference: Ended | None) -> list[str]:
    plan, told = ended.plan, ended.ranks
    errors = {rank: each["error"] for rank, each in told.items() if "error" in each}
    if ended.returncode or errors or len(told) < plan.ranks:
        return [f"failed ({ended.returncode}): {errors}"]
    digests = {each["digest"] for each in told.values()}
    found = [] if len(digests) == 1 else [f"ranks differ: {sorted(digests)}"]
    if reference is not None and plan.fault != "nan" and digests != {reference.ranks[0]["digest"]}:
        found.append(f"other bits than undisturbed: {sorted(digests)}")
    is_dense_alike = plan.fault == "nan" and plan.mode == "gradients" and plan.program != "torch"  # nobody skips
    if not is_dense_alike and not all(each["finite"] for each in told.values()):
        found.append("not finite")
    if bool(told[0]["saved"]) != (plan.fault == "disk"):
        found.append(f"saving: {told[0]['saved']}")
    return found


def _wrong_ends(ended: Ended) -> list[str]:
    plan = ended.plan
    found = [] if ended.returncode else ["ended as if nothing had happened"]
    for rank, told in ended.ranks.items():
        blamed = {int(number) for one, several in BLAMED.findall(told.get("error", ""))
                  for number in (one or several).split(",")}
        if rank != plan.rank and blamed - {plan.rank}:
            found.append(f"rank {rank} blames {sorted(blamed)}: {told['error'][:200]}")
    return found


def _told(folder: Path) -> dict[int, dict[str, Any]]:
    return {int(path.name.split(".")[1]): json.loads(path.read_text()) for path in folder.glob("rank.*.json")}


def _environment(plan: Plan) -> dict[str, str]:
    variables = {**launch.environment(), "OMPI_MCA_rmaps_base_oversubscribe": "1", "PYTHONPATH": str(launch.ROOT),
                 "TF_USE_LEGACY_KERAS": "1" if plan.program == "tf-keras" else "0"}
    if plan.fault == "freeze":
        variables |= {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
                      "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_SHUTDOWN)}
    return variables


def _kill_all_with(text: str) -> int:
    """Kill the processes with this text in their command line; return their number, which should be 0.

    They are given a few seconds to end by themselves: a launcher may return before the last of its ranks.
    """
    for _ in range(50):
        found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if text in _read(path)]
        if not found:
            return 0
        time.sleep(0.1)
    for process in found:
        os.kill(process, signal.SIGKILL)
    return len(found)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return ""

"""Jobs: one launch of `horovodrun`, or torchrun, in which many scenarios run, each of them a test of its own."""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.launch import horovodrun, torchrun
from tests.worker import FAILED, HUNG, RUNNING, Outcome

ENDED = "ended"
"""A test of each job beside those of its scenarios: it ended by itself, with status 0."""
SCENARIOS: dict[Job, list[str]] = {}
"""Scenarios of the jobs that tests are parametrized by."""


@dataclass(frozen=True)
class Job:
    """A framework, the network (mpi or gloo) or torchrun, and the number of ranks.

    quick: whether `make test` has it. keras: "keras3" or "tf_keras"; kernels: "c++" or "numpy".
    """

    framework: str
    backend: str
    size: int
    quick: bool = False
    keras: str = "keras3"
    kernels: str = "c++"

    def __str__(self) -> str:
        others = [self.keras] if self.framework == "tensorflow" else []
        others += ["numpy"] if self.kernels == "numpy" else []
        return "-".join([self.backend, str(self.size), *others])

    def run(self, scenarios: Iterable[str], worker: str = "", extra: Mapping[str, str] | None = None,
            timeout: float = 1500) -> dict[str, Outcome]:
        """Launch the job for these scenarios; return the outcome of each, and of the job: ENDED.

        worker: the program, if not that of the kernels; extra: environment of the ranks.
        """
        scenarios = [name for name in scenarios if name != ENDED]
        worker = worker or ("tests.numpy_worker" if self.kernels == "numpy" else "tests.worker")
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            launch = torchrun if self.backend == "torchrun" else partial(horovodrun, self.backend)
            ended = launch(self.size, "-m", worker, self.framework, str(report), *scenarios, timeout=timeout,
                           extra={"TF_USE_LEGACY_KERAS": str(int(self.keras == "tf_keras")), **(extra or {})})
            found: dict[str, Outcome] = json.loads(report.read_text()) if report.exists() else {}
        before, hung, stacks = ended.output.partition(HUNG)
        _, failed, trace = before.rpartition(FAILED)  # on one rank, for which the others wait
        loads = [round(load, 1) for load in os.getloadavg()]  # of a machine that is too busy, perhaps
        how = f"the job {'hung and ' * bool(hung)}ended with status {ended.returncode} (loads {loads}):\n"
        how += (trace[:4000] if failed else before[-4000:]) * bool(hung)
        how += (hung + stacks)[:12000] or ended.output[-6000:]
        running = next((name for name, outcome in found.items() if outcome == RUNNING), None)
        if running:
            found[running] = f"{'hung' if hung else 'ended the job'}: {running}; {how}"
        for name in scenarios:
            found.setdefault(name, f"did not run after {running}" if running else f"did not run; {how}")
        found[ENDED] = how if ended.returncode else None
        return found


def cases(jobs: Mapping[Job, Iterable[str]]) -> pytest.MarkDecorator:
    """Parametrize a test by the jobs and their scenarios, the last of which is ENDED."""
    SCENARIOS.update((job, list(names)) for job, names in jobs.items())
    return pytest.mark.parametrize(("job", "scenario"), [
        pytest.param(job, name, id=f"{job}-{name}", marks=() if job.quick else pytest.mark.slow)
        for job in jobs for name in (*SCENARIOS[job], ENDED)])


def launcher(selected: Iterable[pytest.Item]) -> Callable[[Job, str], None]:
    """Return a function that gives a scenario's outcome as that of the test which calls it.

    A job is launched once, when the first of its scenarios is asked for, and runs those that are selected: all of
    them if ENDED alone is.
    """
    wanted: dict[Job, list[str]] = defaultdict(list)
    for item in selected:
        parameters: Mapping[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
        if isinstance(parameters.get("job"), Job):
            wanted[parameters["job"]].append(parameters["scenario"])

    found: dict[Job, dict[str, Outcome]] = {}

    def report(job: Job, scenario: str) -> None:
        if job not in found:
            found[job] = {}  # stays if pytest ends the launch: it is not tried again for every scenario
            found[job] = job.run(SCENARIOS[job] if wanted[job] == [ENDED] else wanted[job])
        outcome = found[job].get(scenario, "the launch took too long")
        if isinstance(outcome, dict):
            pytest.skip(outcome["skipped"])
        assert outcome is None, outcome

    return report

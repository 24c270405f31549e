"""Every scenario under real horovodrun: MPI and Gloo, on 1 to 4 ranks; one launch for each pair."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest

from tests.torch.launch import horovodrun
from tests.torch.scenarios import names


@functools.cache
def outcomes(backend: str, size: int) -> dict[str, str | None]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        job = horovodrun(backend, size, "-m", "tests.torch.worker", str(report))
        found: dict[str, str | None] = json.loads(report.read_text()) if report.exists() else {}
    for name in names():
        found.setdefault(name, f"did not run; the job ended with status {job.returncode}:\n{job.output[-6000:]}")
    return found


@pytest.mark.parametrize("scenario", names())
@pytest.mark.parametrize(("backend", "size"), [(b, p) for b in ("mpi", "gloo") for p in (1, 2, 3, 4)])
def test_scenario(backend: str, size: int, scenario: str) -> None:
    failure = outcomes(backend, size)[scenario]
    assert failure is None, failure

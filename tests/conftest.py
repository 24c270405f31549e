"""Settings of all tests: the profiles of hypothesis, what `make test` leaves out, and the launches of jobs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests.jobs import Job, launcher

settings.register_profile("quick", deadline=None, max_examples=6)
settings.register_profile("more", deadline=None, max_examples=20)
settings.load_profile("more" if os.environ.get("CI") == "true" else "quick")

SLOW_FILES = ("test_benchmarks.py", "test_cluster.py", "test_examples.py", "test_programs.py")
"""Files whose tests start the programs beside the package."""
LAUNCHES = {"torch", "distributed", "tensorflow", "test_distributed.py", "test_examples.py", "test_jobs.py",
            "test_mpi.py", "test_programs.py"}
"""Files and folders whose tests start jobs that mostly compute; the jobs of others mostly start, or wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
        if LAUNCHES & {*Path(item.path).parts[-2:]}:
            item.add_marker(pytest.mark.launches)


@pytest.fixture(scope="session")
def run_scenario(request: pytest.FixtureRequest) -> Callable[[Job, str], None]:
    """See tests.jobs.launcher."""
    return launcher(request.session.items)

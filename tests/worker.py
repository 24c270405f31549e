"""One rank of a test job: runs every scenario of a framework, and writes what became of each.

A scenario ends on all ranks, or the ranks vote that it failed on some: then the next can still be trusted.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.scenarios import all_scenarios, process_sets


def run(hvd: Any, name: str, scenario: Callable[[], None]) -> str | None:
    """None where all was well, or the traceback."""
    failure = None
    try:
        scenario()
    except Exception:
        failure = traceback.format_exc()
    failures = [text for text in hvd.allgather_object(failure, name=f"vote.{name}") if text]
    return failures[0] if failures else None


def main() -> None:
    framework, report, *wanted = sys.argv[1:]
    driver = importlib.import_module(f"tests.{framework}.driver")
    driver.start(process_sets(driver.hvd))
    outcomes: dict[str, str | None] = {}
    for name, scenario in all_scenarios(framework).items():
        if wanted and not any(part in name for part in wanted):
            continue
        driver.seed(1234)
        outcomes[name] = run(driver.hvd, name, scenario)
        if driver.hvd.rank() == 0:
            Path(report).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()

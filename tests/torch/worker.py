"""One rank of a test job: runs every scenario, and writes what became of each.

A scenario ends on all ranks, or the ranks vote that it failed on some: then the next can still be trusted.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch

from tests.torch.scenarios import all_scenarios, process_sets


def run(name: str, scenario: Callable[[], None]) -> str | None:
    """None where all was well, or the traceback."""
    failure = None
    torch.manual_seed(1234)
    try:
        scenario()
    except Exception:
        failure = traceback.format_exc()
    failures = [text for text in hvd.allgather_object(failure, name=f"vote.{name}") if text]
    return failures[0] if failures else None


def main() -> None:
    hvd.init(process_sets=process_sets())
    torch.set_num_threads(1)
    report = Path(sys.argv[1])
    outcomes: dict[str, str | None] = {}
    for name, scenario in all_scenarios().items():
        outcomes[name] = run(name, scenario)
        if hvd.rank() == 0:
            report.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()

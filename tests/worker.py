"""One rank of a test job: runs scenarios of a framework, and writes what became of each.

    python -m tests.worker FRAMEWORK REPORT [NAME or PART OF A NAME]...

A scenario ends on all ranks, or the ranks vote that it failed on some: then the next can still be trusted.
If it hangs, the ranks write where they are, and rank 0 ends the job. The report says which one that was.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from tests.scenarios import all_scenarios, process_sets
from tests.scenarios.common import Skipped

Outcome = str | dict[str, str] | None
"""None: it passed. A dictionary: it was skipped, with the reason. A string: the traceback, or:"""
RUNNING = "has not ended"
HUNG = "Timeout ("
"""Text that faulthandler writes before the stacks."""
FAILED = "a scenario failed on this rank:"
LIMIT = float(os.environ.get("SCENARIO_LIMIT", "300"))
"""In seconds, for a scenario and its vote."""
END_LIMIT = float(os.environ.get("END_LIMIT", "60"))
"""For what a rank does after the last one."""


def attempt(scenario: Callable[[], None]) -> Outcome:
    """Return the outcome on this rank."""
    try:
        scenario()
    except Skipped as reason:
        return {"skipped": str(reason)}
    except Exception:
        failure = traceback.format_exc()
        sys.stderr.write(f"{FAILED}\n{failure}")  # if the others wait, this rank's vote is never counted
        return failure
    return None


def together(everyone: Sequence[Outcome]) -> Outcome:
    """Return the outcome on all ranks."""
    failures = [outcome for outcome in everyone if isinstance(outcome, str)]
    if failures:
        return failures[0]
    if any(outcome != everyone[0] for outcome in everyone):
        return f"the ranks do not agree on what is skipped: {everyone}"
    return everyone[0]


def is_wanted(name: str, wanted: Collection[str], known: Collection[str]) -> bool:
    """Return True if it is named, in full or in part; a name that is another's beginning means that one alone."""
    return not wanted or name in wanted or any(part in name for part in wanted if part not in known)


def main() -> None:
    framework, report, *wanted = sys.argv[1:]
    driver = importlib.import_module(f"tests.{framework}.driver")
    gc.freeze()  # the frameworks' million objects stay anyway, and looking at them takes a tenth of a job's time
    driver.start(process_sets(driver.hvd))
    rank = driver.hvd.rank()
    outcomes: dict[str, Outcome] = {}

    def note(name: str, outcome: Outcome) -> None:
        outcomes[name] = outcome
        if rank == 0:
            Path(report).with_suffix(".new").write_text(json.dumps(outcomes))
            Path(report).with_suffix(".new").replace(report)  # whole, whenever the job ends

    scenarios = all_scenarios(framework)
    for name, scenario in scenarios.items():
        if not is_wanted(name, wanted, scenarios):
            continue
        note(name, RUNNING)
        # One after the other, so that their lines do not mix; rank 0 last, because its end is that of all.
        faulthandler.dump_traceback_later(LIMIT + (rank / 4 or 2), exit=rank == 0)
        driver.seed(1234)
        driver.hvd.allgather_object(None, name=f"begin.{name}")  # it has been noted, whatever it does to the job
        note(name, together(driver.hvd.allgather_object(attempt(scenario), name=f"vote.{name}")))
    faulthandler.dump_traceback_later(END_LIMIT, exit=True)


if __name__ == "__main__":
    main()

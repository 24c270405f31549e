"""One rank of a job in which a rank goes wrong: python -m benchmarks.faults.rank FOLDER."""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
from pathlib import Path

from benchmarks import launch
from benchmarks.faults.inject import Injector
from benchmarks.faults.plans import Plan

PLAN = "plan.json"


def main() -> None:
    folder = Path(sys.argv[1])
    plan = Plan(**json.loads((folder / PLAN).read_text()))
    rank = launch.rank()
    with (folder / f"crash.{rank}").open("w") as crash:  # empty, if no signal like SIGSEGV comes
        faulthandler.enable(crash)
        framework = "torch" if plan.program == "torch" else "tensorflow"
        program = importlib.import_module(f"benchmarks.faults.{framework}_program").Program(plan)
        try:
            saved = program.train(Injector(plan, rank, folder), folder / "state")
            digest, finite = program.digest()
        except Exception as error:
            _tell(folder, rank, error=f"{type(error).__name__}: {error}")
            raise
        _tell(folder, rank, saved=saved, digest=digest, finite=finite)
        faulthandler.disable()


def _tell(folder: Path, rank: int, **outcome: object) -> None:
    part = folder / f"part.{rank}"
    part.write_text(json.dumps(outcome))
    part.replace(folder / f"rank.{rank}.json")


if __name__ == "__main__":
    main()

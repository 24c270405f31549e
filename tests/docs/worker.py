"""One rank of the job that runs the fragments of a framework, one after the other.

    python -m tests.docs.worker FRAMEWORK FOLDER

What became of each is in FOLDER/report.json.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

from tests.docs.blocks import FRAGMENTS, Block
from tests.worker import Outcome, attempt, together


def run(block: Block, context: Any, path: Path) -> None:
    """Run a block; if it loads a file, a second time, from the file that the first one has saved."""
    run_once(block, context, path)
    if "torch.load(" in block.code:
        context.hvd.allgather_object("saved", name=f"saved.{block}")
        assert path.exists()
        run_once(block, context, path)


def run_once(block: Block, context: Any, path: Path) -> None:
    names = context.prepare(block.code, str(path))
    unknown = block.missing_names() - set(names)
    assert not unknown, (f"{sorted(unknown)} are not defined: give them in {context.__name__}, or write "
                         "'<!-- not run: why -->' before the block")
    exec(compile(block.code, str(block), "exec"), names)
    context.finish(names)


def main() -> None:
    framework, folder = sys.argv[1:]
    if framework == "distributed":
        hvd = importlib.import_module("tests.distributed.hvd").hvd
        hvd.init()
    else:
        hvd = importlib.import_module(f"horovod.{framework}")
        hvd.init(process_sets="dynamic")
    context = importlib.import_module(f"tests.docs.{framework}_context")
    outcomes: dict[str, Outcome] = {}
    for number, block in enumerate(each for each in FRAGMENTS if each.framework == framework):
        outcome = attempt(lambda block=block, number=number: run(block, context, Path(folder, f"{number}.state")))
        outcomes[str(block)] = together(hvd.allgather_object(outcome, name=f"vote.{block}"))
        logging.getLogger("horovod_oktopk").setLevel(logging.NOTSET)  # one of them sets it
        if hvd.rank() == 0:
            Path(folder, "report.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()

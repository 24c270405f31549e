"""Several trainings by one program, in turns in one job, whose ranks start only once.

One rank of it:

    horovodrun -np 4 -H localhost:4 python -m benchmarks.accuracy.in_turns MODULE LINES

LINES is a JSON file with the arguments of each training.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def main() -> None:
    module, lines = sys.argv[1:]
    program = importlib.import_module(module)
    for line in json.loads(Path(lines).read_text()):
        program.main(line)


if __name__ == "__main__":
    main()

"""The papers' figures, as far as one machine can measure them: tables, data/paper.json, images/paper_<part>.png.

    python -m benchmarks.paper.figures                  all parts
    python -m benchmarks.paper.figures xi age           two of them; what was found for others stays
    python -m benchmarks.paper.figures --show           tables and pictures of what was measured before

A part is a module of this folder, with the functions of `Part`; a new one needs its name in PARTS.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from benchmarks.launch import end_cleanly_on_sigterm
from benchmarks.output import write_json
from benchmarks.paper import age, balance, convergence, fill_in, rounds, scaling, selected, stragglers, xi


class Part(Protocol):
    """One figure or claim. found: what is measured, as JSON can hold it."""

    def measure(self, progress: Any) -> dict[str, Any]:
        """Measure. progress(items, title): the items, in a progress bar."""

    def rows(self, found: dict[str, Any]) -> list[list[str]]:
        """Return a table; its first row is the header."""

    def plot(self, found: dict[str, Any], path: Path) -> None:
        """Draw a picture."""


PARTS: dict[str, Part] = {"xi": xi, "selected": selected, "age": age, "fill_in": fill_in, "convergence": convergence,
                          "rounds": rounds, "stragglers": stragglers, "balance": balance, "scaling": scaling}
"""Parts from `rounds` on start jobs; `balance` and `scaling` need root and iproute2, for hosts of their own."""


def markdown(rows: list[list[str]]) -> str:
    header, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *others])


def main(line: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"all, if not given: {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, default=Path("docs"), help="folder, of data/ and images/")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    arguments = parser.parse_args(line)
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        parser.error(f"parts are {', '.join(PARTS)}; got {', '.join(unknown)}")
    torch.set_num_threads(1)
    end_cleanly_on_sigterm()
    path = arguments.output / "data" / "paper.json"
    for name in arguments.parts or PARTS:
        known = json.loads(path.read_text()) if path.exists() else {}
        if not arguments.show:
            found = json.loads(json.dumps(PARTS[name].measure(tqdm)))
            known[name] = {**found, "load": os.getloadavg()[1]}
            write_json(path, known)
        if name in known:
            print(f"\n{name}\n\n{markdown(PARTS[name].rows(known[name]))}")
            PARTS[name].plot(known[name], arguments.output / "images" / f"paper_{name}.png")


if __name__ == "__main__":
    main()

"""The papers' figures, as far as one machine can measure them: tables, docs/data/paper.json and pictures.

    python -m benchmarks.paper.figures                  all parts
    python -m benchmarks.paper.figures xi age           two of them; what was found for others stays
    python -m benchmarks.paper.figures --show           tables and pictures of what was measured before

A part is a module of this folder, with the functions of `Part`; a new one needs its name in PARTS.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from tqdm import tqdm

from benchmarks.output import write_json
from benchmarks.paper import age, convergence, fill_in, selected, xi

T = TypeVar("T")
Found = dict[str, Any]
"""What a part has measured, as JSON can hold it."""


class Progress(Protocol):
    """A bar around what takes long."""

    def __call__(self, items: Iterable[T], title: str) -> Iterable[T]: ...


class Part(Protocol):
    """One figure or claim. A part may also have plot(found, path), which draws a picture."""

    def measure(self, progress: Progress) -> Found: ...

    def rows(self, found: Found) -> list[list[str]]:
        """Return a table; its first row is the header."""


PARTS: dict[str, Part] = {"xi": xi, "selected": selected, "age": age, "fill_in": fill_in, "convergence": convergence}


def bar(items: Iterable[T], title: str) -> Iterable[T]:
    return tqdm(items, desc=title, mininterval=0.5)


def markdown(rows: list[list[str]]) -> str:
    header, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *others])


def show(name: str, found: Found, folder: Path) -> None:
    """Print a part's table, and draw its picture."""
    print(f"\n{name}\n\n{markdown(PARTS[name].rows(found))}")
    plot = getattr(PARTS[name], "plot", None)
    if plot is not None:
        plot(found, folder / "images" / f"paper_{name}.png")


def main(line: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"all, if not given: {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, default=Path("docs"), help="folder, of data/ and images/")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    arguments = parser.parse_args(line)
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    path = arguments.output / "data" / "paper.json"
    for name in arguments.parts or PARTS:
        known = json.loads(path.read_text()) if path.exists() else {}
        if not arguments.show:
            found = PARTS[name].measure(bar)
            known[name] = {**json.loads(json.dumps(found)), "load": os.getloadavg()[1]}
            write_json(path, known)
        if name in known:
            show(name, known[name], arguments.output)


if __name__ == "__main__":
    main()

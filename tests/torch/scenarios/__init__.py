"""Scenarios: what a user does, on every rank of a job. Each module's functions named `check_*` are run, by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

SETS: list[object] = []


def process_sets() -> list[object]:
    """Two process sets that divide the ranks; to be handed to hvd.init."""
    import os

    import horovod.torch as hvd
    size = int(os.environ.get("HOROVOD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
    if size > 1:
        SETS.extend([hvd.ProcessSet(list(range(size - 1))), hvd.ProcessSet([size - 1])])
    return SETS


def names() -> list[str]:
    """All scenarios' names, without importing a framework."""
    import ast
    from pathlib import Path
    found = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        found += [f"{path.stem}.{node.name.removeprefix('check_')}" for node in tree.body
                  if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]
    return found


def all_scenarios() -> dict[str, Callable[[], None]]:
    """Every scenario by name, in a fixed order."""
    modules = {info.name: importlib.import_module(f"{__name__}.{info.name}")
               for info in pkgutil.iter_modules(__path__)}
    return {name: getattr(modules[name.split(".")[0]], "check_" + name.split(".")[1]) for name in names()}

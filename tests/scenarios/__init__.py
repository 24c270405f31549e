"""Scenarios: what a user does, on every rank of a job, in either framework, or of the core alone.

Functions named `check_*` are run by name. Those of this package take a Kind: one way of training in one
framework (see driver.py). A framework's own are in tests/<framework>/scenarios.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KINDS = {"torch": ("optimizer",), "tensorflow": ("tape", "function", "keras"), "core": ("core",),
         "distributed": ("optimizer",)}
FOLDERS = {"distributed": ("torch", "distributed")}
"""Folders of tests/ with the scenarios of a framework, if not that of its name alone."""
ONLY = dict.fromkeys(("partial", "step_ahead"), ("optimizer", "keras", "core")) | {
    "transport": ("optimizer", "function", "keras")}
"""Modules whose scenarios are not for all kinds."""
WHERE_RANKS_MATTER = ("sparse.", "hosts.", "transport.", "state.a_resumed",
                      "features.a_rank_outside", "partial.nothing", "step_ahead.every_", "step_ahead.dense",
                      "one_rank.", "step_ahead.one_rank_alone", "step_ahead.a_worker", "step_ahead_hosts.")
"""Scenarios that depend most on the network, or on how many ranks there are, by the beginnings of their names.

The core runs all on 1, 2, 3, 5 and 8 ranks.
"""
SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE")
"""Variables with the number of ranks: of Horovod over Gloo, of mpirun, of torchrun."""
SETS: list[Any] = []
"""Two process sets that divide the ranks, where there are several."""


def _checks(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield module, function, and True if it takes a kind; no framework is imported."""
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("check_"):
                yield path.stem, node.name, bool(node.args.args)


@functools.cache
def _found(framework: str) -> list[tuple[str, str, str, str | None]]:
    """Return name, module, function and kind of every scenario, in a fixed order."""
    found: list[tuple[str, str, str, str | None]] = []
    own = [(f"tests.{each}.scenarios", HERE.parent / each / "scenarios")
           for each in FOLDERS.get(framework, (framework,))]
    for package, folder in (("tests.scenarios", HERE), *own):
        for module, function, takes_kind in _checks(folder):
            name = f"{module}.{function.removeprefix('check_')}"
            kinds = [kind for kind in KINDS[framework] if kind in ONLY.get(module, KINDS[framework])]
            found += [(name + (f"[{kind}]" if kind else ""), f"{package}.{module}", function, kind)
                      for kind in (kinds if takes_kind else (None,))]
    return found


def names(framework: str, kinds: Iterable[str] | None = None) -> list[str]:
    """Return the scenarios' names; no framework is imported. kinds: those wanted, if not all."""
    return [name for name, *_, kind in _found(framework) if kind is None or kinds is None or kind in kinds]


def all_scenarios(framework: str) -> dict[str, Callable[[], None]]:
    """Return every scenario by name, in a fixed order."""
    driver = importlib.import_module(f"tests.{framework}.driver")
    return {name: functools.partial(check, driver.Kind(kind)) if kind else check
            for name, (check, kind) in loaded(framework).items()}


@functools.cache
def loaded(framework: str) -> dict[str, tuple[Callable[..., None], str | None]]:
    """Return every scenario's function and kind by name, in a fixed order."""
    return {name: (getattr(importlib.import_module(module), function), kind)
            for name, module, function, kind in _found(framework)}


def process_sets(hvd: Any) -> list[Any]:
    """Return two process sets that divide the ranks, for hvd.init."""
    import os
    size = int(next(os.environ[name] for name in SIZES if name in os.environ))
    if size > 1:
        SETS.extend([hvd.ProcessSet(list(range(size - 1))), hvd.ProcessSet([size - 1])])
    return SETS

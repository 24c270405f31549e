"""Digests of training: one number for all bits that a case gives, with every scheme and mode.

`python -m tests.core.digests` records them in digests.json: after a change that is meant to change results, and says
so. `test_digests.py` compares.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from horovod_oktopk import Dense, GaussianK, GTopk, OkTopk, SameBlocks, StepAhead, TopkA, TopkDSA
from tests.core.driver import CoreTrainer, Kind
from tests.core.world import Hvd, run
from tests.scenarios.common import everywhere, flat

RECORDED = Path(__file__).with_name("digests.json")
SHAPES = {"b.weight": (16, 9), "a.bias": (30,), "c.scale": (3, 4, 8), "d": (1,)}
STEPS, NAN_STEP, READ_EVERY = 30, 7, 5
SIZES = (1, 2, 4, 7)
DENSITY = 0.1


@dataclass(frozen=True)
class Case:
    """One training. arguments: of a trainer, beside the options."""

    options: Any
    sizes: tuple[int, ...] = SIZES
    arguments: Mapping[str, Any] | None = None

    @property
    def ranks_per_worker(self) -> int:
        """With StepAhead the ranks of a host have the same gradients."""
        return int(self.options.scheme.hierarchical or 1) if isinstance(self.options, StepAhead) else 1


OKTOPK = OkTopk(density=DENSITY)
REUSE = replace(OKTOPK, selection="reuse", threshold_interval=4, region_interval=5)
HOSTS = replace(OKTOPK, hierarchical=2)
CASES = {
    "OkTopk": Case(OKTOPK),
    "OkTopk float64": Case(OKTOPK, arguments={"dtype": "float64"}),
    "OkTopk reuse": Case(REUSE),
    "OkTopk bfloat16": Case(replace(OKTOPK, value_dtype="bfloat16")),
    "OkTopk log4": Case(replace(OKTOPK, value_dtype="log4")),
    "OkTopk global density 0.05": Case(replace(OKTOPK, global_density=0.05)),
    "OkTopk global density 1": Case(replace(OKTOPK, global_density=1.0)),
    "OkTopk global density None": Case(replace(OKTOPK, global_density=None)),
    "OkTopk density 1": Case(replace(OKTOPK, density=1.0)),
    "OkTopk hosts": Case(HOSTS, (4,)),
    "TopkA": Case(TopkA(density=DENSITY)),
    "TopkDSA": Case(TopkDSA(density=DENSITY)),
    "GTopk tree": Case(GTopk(density=DENSITY)),
    "GTopk allgather": Case(GTopk(density=DENSITY, collective="allgather")),
    "GaussianK": Case(GaussianK(density=DENSITY)),
    "SameBlocks": Case(SameBlocks(density=DENSITY)),
    "StepAhead SameBlocks": Case(StepAhead(SameBlocks(density=DENSITY))),
    "StepAhead": Case(StepAhead(OkTopk())),
    "StepAhead sum": Case(StepAhead(OKTOPK), (4,), {"op": Hvd.Sum}),
    "StepAhead unrounded": Case(StepAhead(replace(OKTOPK, value_dtype=None))),
    "StepAhead without overlap": Case(StepAhead(OKTOPK, overlap=False)),
    "StepAhead 3 local steps": Case(StepAhead(OKTOPK, local_steps=3)),
    "StepAhead ahead 0.7": Case(StepAhead(OKTOPK, ahead=0.7)),
    "StepAhead gain auto": Case(StepAhead(OKTOPK, gain="auto"), arguments={"normalizes": True}),
    "StepAhead TopkA": Case(StepAhead(TopkA(density=DENSITY))),
    "StepAhead Dense": Case(StepAhead(Dense())),
    "StepAhead hosts": Case(StepAhead(HOSTS), (4,)),
}
CASES |= {f"{name} sum": replace(CASES[name], sizes=(4,), arguments={"op": Hvd.Sum}) for name in (
    "OkTopk", "OkTopk reuse", "OkTopk hosts", "TopkA", "TopkDSA", "GTopk tree", "GTopk allgather", "GaussianK")}


def names() -> dict[str, tuple[Case, int]]:
    """Return the case and number of ranks by the digest's name."""
    return {f"{name} on {size}": (case, size) for name, case in CASES.items() for size in case.sizes}


def digest_of(case: Case, size: int) -> str:
    """See digest_on; on ranks that are threads."""
    digests = []

    def program(hvd: Hvd) -> None:
        kind = Kind(hvd)
        digests.append(digest_on(kind, case))
        kind.end()

    run(size, program)
    return digests[0]


def digest_on(kind: Kind, case: Case) -> str:
    """Return 16 hex digits, of the parameters of all steps and of every rank's residual at the end."""
    hvd = kind.hvd
    trainer = kind(case.options, shapes=SHAPES, **(case.arguments or {}))
    digest = hashlib.sha256()
    for step in range(1, STEPS + 1):
        _step(trainer, gradients(step, hvd.rank() // case.ranks_per_worker), step, digest)
    shared = everywhere(hvd, digest.hexdigest())
    assert len(set(shared)) == 1, f"the ranks' parameters differ: {shared}"
    for residual in everywhere(hvd, trainer.residual().tobytes()):
        digest.update(residual)
    return digest.hexdigest()[:16]


def _step(trainer: CoreTrainer, grads: dict[str, np.ndarray], step: int, digest: Any) -> None:
    """Take one step; if no rank has an update, or the only rank has NaN, go on with the parameters as they were."""
    if trainer.mode.reads_memory and not trainer.mode.reduction.is_alone:  # StepAhead
        trainer.step(grads)
        if step % READ_EVERY:  # reading waits for the exchange
            return
    else:
        before = trainer.values()
        trainer.step(grads)
        if not trainer.report().finite:
            trainer.assign(before)
    digest.update(flat(trainer.values()).tobytes())


def gradients(step: int, worker: int) -> dict[str, np.ndarray]:
    """Return standard normal gradients; at one step one worker has a NaN."""
    rng = np.random.default_rng((step, worker))
    grads = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    if step == NAN_STEP and worker == 0:
        grads["a.bias"][3] = np.nan
    return grads


if __name__ == "__main__":
    recorded = {name: digest_of(*each) for name, each in names().items()}
    RECORDED.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")
    print(f"{len(recorded)} digests in {RECORDED}", file=sys.stderr)

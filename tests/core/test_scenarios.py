"""Every scenario of the core, on ranks that are threads."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_oktopk import OkTopk, StepAhead
from tests.core.driver import Kind
from tests.core.world import Hvd, run
from tests.scenarios import loaded, names
from tests.scenarios.common import gradients
from tests.scenarios.leaks import assert_memory_stays

SIZES = (1, 2, 3, 5, 8)
LACKING = {"gradient_predivide_factor", "groups", "backward_passes_per_step", "Horovod's own process sets",
           "Horovod's own compressions", "a job in which partial rounds cannot work"}
"""Arguments that only a framework has."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.slow if size > 5 else ()) for size in SIZES])
@pytest.mark.parametrize("name", names("core"))
def test_scenario(name: str, size: int) -> None:
    check, _ = loaded("core")[name]

    def program(hvd: Hvd) -> None:
        kind = Kind(hvd)
        with np.errstate(all="ignore"):
            check(kind)
        kind.end()

    skipped = run(size, program)
    assert len(set(skipped)) == 1, f"the ranks do not agree on what is skipped: {skipped}"
    if skipped[0] is not None:
        needed = skipped[0].removeprefix("needs ")
        wrong_size = [f"{ranks} ranks" for ranks in range(size + 1, 5)] + ["one rank alone"] * (size > 1)
        assert needed in {*LACKING, *wrong_size}, skipped[0]
        pytest.skip(skipped[0])


@pytest.mark.parametrize("options", [OkTopk(density=0.1), StepAhead(OkTopk(density=0.1))],
                         ids=["oktopk", "step_ahead"])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_steps(options: OkTopk | StepAhead, size: int) -> None:
    def program(hvd: Hvd) -> None:
        kind = Kind(hvd)
        trainer = kind(options)
        assert_memory_stays(hvd, lambda step: trainer.step(gradients(step % 10, hvd.rank())))
        kind.end()

    run(size, program)

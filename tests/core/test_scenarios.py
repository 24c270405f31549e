"""Every scenario of the core, on ranks that are threads."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.driver import Kind
from tests.core.world import Hvd, run
from tests.scenarios import loaded, names

SIZES = (1, 2, 3, 5, 8)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", SIZES)
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
        pytest.skip(skipped[0])

"""The accumulator whose memory TensorFlow's gradients share does what every accumulator must."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.selection.accumulators import PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS)
def test_conformance(program: str) -> None:
    # Here, as importing TensorFlow takes seconds.
    from horovod_oktopk.tensorflow.tensors import LendingAccumulator
    from horovod_oktopk.vectors.layout import Layout

    def new(n: int, dtype: Any) -> Any:
        return LendingAccumulator(Layout([("a", (n,), np.dtype(dtype).name)]))

    PROGRAMS[program](new, lambda gradient: gradient)

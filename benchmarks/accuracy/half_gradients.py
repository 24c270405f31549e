"""Horovod's Compression.fp16, to compare with: gradients are rounded to float16, and added up in it.

For ranks that are threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.accuracy.averaging import AveragingOptimizer, Floats


@dataclass(frozen=True)
class HalfGradients:
    """It has no options."""


class HalfGradientsOptimizer(AveragingOptimizer):
    """One rank's end."""

    def _mean(self, gradients: list[Floats]) -> list[Floats]:
        total = self._transport.allreduce(np.concatenate([each.ravel() for each in gradients]).astype(np.float16))
        mean = (total / np.float16(self._transport.size)).astype(np.float32)
        return np.split(mean, np.cumsum([each.size for each in gradients])[:-1])

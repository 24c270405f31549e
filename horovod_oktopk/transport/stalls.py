"""Limits on the time for which ranks wait for one another, by Horovod's settings."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class StallLimits:
    """Horovod's settings. warning, shutdown: seconds, 0 for never."""

    warning: float
    shutdown: float

    @classmethod
    def of_horovod(cls) -> StallLimits:
        """Read the variables that Horovod and `horovodrun` know."""
        if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            return cls(0.0, 0.0)
        return cls(float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS") or 60),
                   float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 0))

    def patience(self, timeout: float) -> float:
        """Return the seconds after which to end a wait that would otherwise end after `timeout`."""
        return min(timeout, self.shutdown or timeout)

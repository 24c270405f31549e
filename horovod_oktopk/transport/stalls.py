"""For how long ranks wait for one another, by Horovod's settings."""

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
        """From the variables that Horovod and `horovodrun` know."""
        if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            return cls(0.0, 0.0)
        return cls(float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS") or 60),
                   float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 0))

    def patience(self, timeout: float) -> float:
        """The seconds of a wait that is to end by itself after `timeout`."""
        return min(timeout, self.shutdown or timeout)

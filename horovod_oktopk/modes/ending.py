"""The end of all modes of this process, before Horovod ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..transport.ending import leave
from .partial.mode import end_all
from .step_ahead.mode import close_all


def wrap_shutdown(shutdown: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Horovod's shutdown, so that rounds, exchanges and messages of this process end first."""
    @functools.wraps(shutdown)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        end_all()
        close_all()
        leave("has called hvd.shutdown(), while others go on: call it on all ranks, after the last step")
        return shutdown(*args, **kwargs)

    return wrapped

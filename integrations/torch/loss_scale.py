"""The loss scale, as far as it is known before an optimizer's own GradScaler is."""

from __future__ import annotations

from typing import Any

_last_scaler: Any = None


def note_scaler(scaler: Any) -> None:
    """This GradScaler scales a loss now."""
    global _last_scaler
    _last_scaler = scaler


def last_scale() -> float | None:
    """The present scale of the scaler that last scaled a loss; None where there was none."""
    return None if _last_scaler is None else float(_last_scaler.get_scale())

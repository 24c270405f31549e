"""Loss scaling: keeps the residual in one unit while the loss scale changes.

Horovod sees scaled gradients, so the residual holds the scale too. A loss is scaled, then its gradients
are reduced: the scaler that was last asked for a loss is that of the gradients which come next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from .versions import KERAS_3

_last: tuple[Any, Callable[[], Any]] | None = None
"""The graph in which a loss was scaled last (None: eagerly), and what gives the scale."""


def scale_of_gradients() -> Any:
    """The loss scale that the gradients at hand hold (a scalar tensor); None where nobody scaled their loss."""
    global _last
    last, _last = _last, None
    return tf.convert_to_tensor(last[1]()) if last is not None and last[0] in _present_graphs() else None


def install() -> None:
    """Watches Keras' loss-scaling optimizers, of either Keras."""
    scaling = tf.keras.mixed_precision.LossScaleOptimizer
    if KERAS_3:
        _watch(scaling, "scale_loss", lambda self: self.dynamic_scale.value if self.built else self.initial_scale)
    else:
        for cls in scaling.__subclasses__():
            _watch(cls, "get_scaled_loss", lambda self: self.loss_scale)


def _watch(cls: type, method: str, scale: Callable[[Any], Any]) -> None:
    """Takes note whenever a loss is scaled by `method` of a loss-scaling optimizer; scale: its present scale."""
    original = getattr(cls, method)
    if getattr(original, "_oktopk_installed", False):
        return

    @functools.wraps(original)
    def wrapped(self: Any, loss: Any) -> Any:
        global _last
        _last = _present_graphs()[0], functools.partial(scale, self)
        return original(self, loss)

    wrapped._oktopk_installed = True  # type: ignore[attr-defined]
    setattr(cls, method, wrapped)


def _present_graphs() -> list[Any]:
    """The graph being built and those around it; [None] where operations run eagerly."""
    if tf.executing_eagerly():
        return [None]
    graphs = [tf.compat.v1.get_default_graph()]
    while (outer := getattr(graphs[-1], "outer_graph", None)) is not None:
        graphs.append(outer)
    return graphs

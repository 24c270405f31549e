"""Loss scaling: gradients are reduced without the scale, so that residuals have one unit while the scale changes.

An optimizer that scales losses knows its scale. A tape is told whose scale a loss holds by a mark on the loss.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.tensorflow.private import KERAS_3
from horovod_oktopk.tensorflow.tensors import Scale

MARK = "_oktopk_scaler"
Scaled = tuple[weakref.ref[Any] | None, weakref.ref[Any]]
_scaled: list[Scaled] = []
"""The scalers of losses whose gradients have not been asked for, each with the graph in which it scaled, or None.

None is kept alive: with another compression than ours nobody ever takes them from here.
"""
WHOSE = ("a LossScaleOptimizer has scaled a loss, and whether these gradients hold its scale is not known: hand the "
         "scaled loss itself to tape.gradient(), without further arithmetic, and each by itself")


SCALE = "scale_loss" if KERAS_3 else "get_scaled_loss"


def wrap_scale_loss(scale_loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap the method SCALE of such a class, to mark the losses that it scales."""
    @functools.wraps(scale_loss)
    def wrapped(self: Any, loss: Any) -> Any:
        loss = scale_loss(self, loss)
        with contextlib.suppress(AttributeError):  # of a plain number
            setattr(loss, MARK, weakref.ref(self))  # a loss may stay with its graph for good
        graph = _current_graphs()[0]
        scaled = None if graph is None else weakref.ref(graph), weakref.ref(self)
        if scaled not in _scaled:
            _scaled[:] = [*filter(_is_alive, _scaled), scaled]
        return loss

    return wrapped


def scale_of_loss(loss: Any) -> Scale:
    """Return the scale by which a loss, a tensor or several, was multiplied; None if it is unscaled.

    The mark serves once. Raise PluginError for something that was computed from scaled losses (a part, a sum): the
    scale of its gradients is not known.
    """
    scalers = {mark() for each in tf.nest.flatten(loss) if (mark := getattr(each, MARK, None)) is not None}
    if len(scalers) > 1 or None in scalers:
        raise PluginError(WHOSE)
    if not scalers:
        graphs = _current_graphs()
        here = [each for each in _scaled if _is_alive(each) and (each[0] and each[0]()) in graphs]
        _scaled[:] = [each for each in _scaled if each not in here]
        if here:
            raise PluginError(WHOSE)
        return None
    [scaler] = scalers
    forget(scaler)
    return scale_of(scaler)


def scale_of(scaler: Any) -> Scale:
    """Return the present scale of an optimizer that scales losses; None for any other."""
    if not isinstance(scaler, tf.keras.mixed_precision.LossScaleOptimizer):
        return None
    scale = (scaler.dynamic_scale.value if scaler.built else scaler.initial_scale) if KERAS_3 else scaler.loss_scale
    return tf.convert_to_tensor(scale, tf.float32)


def forget(scaler: Any) -> None:
    """Drop the losses of a scaler, whose gradients are at hand."""
    _scaled[:] = [each for each in _scaled if each[1]() is not scaler]


def _current_graphs() -> list[Any]:
    if tf.executing_eagerly():
        return [None]
    graphs = [tf.compat.v1.get_default_graph()]
    while (outer := getattr(graphs[-1], "outer_graph", None)) is not None:
        graphs.append(outer)
    return graphs


def _is_alive(scaled: Scaled) -> bool:
    graph, scaler = scaled
    return scaler() is not None and (graph is None or graph() is not None)

"""Loss scaling: keeps the residual in one unit while the loss scale changes.

Horovod sees scaled gradients, so the residual holds the scale too. Whose scale it is, is known where a Keras 3
optimizer applies gradients, and of a loss as its scaler gave it. Where a tape is given another loss than that (a
part of it, a sum), it is the one scaler that has scaled a loss whose gradients have not come yet.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.tensorflow.versions import KERAS_3

_UNKNOWN = object()
_present: Any = _UNKNOWN
"""The scaler of the gradients that are being reduced; None where they are not scaled."""
_waiting: list[tuple[weakref.ref[Any] | None, weakref.ref[Any]]] = []
"""Scalers of losses whose gradients have not been reduced, each with the graph in which it scaled (None: eagerly).
None is kept alive: with another compression than ours nobody ever takes them from here."""


def scale_of_gradients() -> Any:
    """The loss scale that the gradients at hand hold (a scalar tensor); None where nobody scaled their loss."""
    scaler = _take_waiting() if _present is _UNKNOWN else _present
    return None if scaler is None else tf.convert_to_tensor(_scale_of(scaler))


@contextlib.contextmanager
def gradients_of(loss: Any) -> Iterator[None]:
    """What is reduced inside are gradients of this loss (a tensor, a function, or several)."""
    known = [each._oktopk_scaler for each in tf.nest.flatten(loss) if hasattr(each, "_oktopk_scaler")]
    with _reducing(_the_one(known) if known else _UNKNOWN):
        yield


@contextlib.contextmanager
def gradients_for(optimizer: Any) -> Iterator[None]:
    """What is reduced inside are gradients that were given to this Keras 3 optimizer."""
    scaling = isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    with _reducing(optimizer if scaling else None):
        yield


@contextlib.contextmanager
def _reducing(scaler: Any) -> Iterator[None]:
    global _present
    before, _present = _present, scaler
    _waiting[:] = [each for each in _waiting if each[1]() is not scaler]
    try:
        yield
    finally:
        _present = before


def install() -> None:
    """Watches Keras' loss-scaling optimizers, of either Keras."""
    scaling = tf.keras.mixed_precision.LossScaleOptimizer
    if KERAS_3:
        _watch(scaling, "scale_loss")
    else:
        for cls in scaling.__subclasses__():
            _watch(cls, "get_scaled_loss")


def _watch(cls: type, method: str) -> None:
    """Takes note whenever a loss is scaled by `method` of a loss-scaling optimizer."""
    original = getattr(cls, method)
    if getattr(original, "_oktopk_installed", False):
        return

    @functools.wraps(original)
    def wrapped(self: Any, loss: Any) -> Any:
        scaled = original(self, loss)
        with contextlib.suppress(AttributeError):  # of a plain number
            scaled._oktopk_scaler = self
        graph = _present_graphs()[0]
        waiting = None if graph is None else weakref.ref(graph), weakref.ref(self)
        if waiting not in _waiting:
            _waiting[:] = [*filter(_is_alive, _waiting), waiting]
        return scaled

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


def _take_waiting() -> Any:
    """The one scaler that waits for its gradients in the graphs at hand; None where there is none."""
    graphs = _present_graphs()
    here = [(graph, scaler) for graph, scaler in _waiting if (graph and graph()) in graphs]
    _waiting[:] = [each for each in _waiting if each not in here and _is_alive(each)]
    return _the_one([present for _, scaler in here if (present := scaler()) is not None])


def _is_alive(waiting: tuple[weakref.ref[Any] | None, weakref.ref[Any]]) -> bool:
    graph, scaler = waiting
    return scaler() is not None and (graph is None or graph() is not None)


def _the_one(scalers: list[Any]) -> Any:
    different = {id(scaler): scaler for scaler in scalers}
    if len(different) > 1:
        raise PluginError(f"{len(different)} LossScaleOptimizers have scaled a loss, and whose scale these gradients "
                          "hold is not known: hand the scaled loss itself to tape.gradient(), without further "
                          "arithmetic, and each by itself")
    return next(iter(different.values()), None)


def _scale_of(scaler: Any) -> Any:
    if not KERAS_3:
        return scaler.loss_scale
    return scaler.dynamic_scale.value if scaler.built else scaler.initial_scale

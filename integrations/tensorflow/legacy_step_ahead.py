"""tf-keras with `compression=StepAhead(...)`: an optimizer that takes its own steps, inside Horovod's; loss scaling;
and Horovod's callback that broadcasts, before the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.tensorflow.step_ahead import DecoupledDecay, OwnSteps, own_steps_of


class TakesOwnSteps:
    """Comes before a tf-keras optimizer's own class, and after the class that Horovod makes."""

    _allreduce_grads: OwnSteps
    """What Horovod has asked us for."""
    weight_decay = DecoupledDecay()

    @property
    def learning_rate(self: Any) -> Any:
        """As the user has set it; while a step is taken, times λ · gain."""
        return self._allreduce_grads.times_coefficient(super().learning_rate)  # type: ignore[misc]

    @learning_rate.setter
    def learning_rate(self: Any, rate: Any) -> None:
        super(TakesOwnSteps, type(self)).learning_rate.fset(self, rate)  # type: ignore[misc]

    def apply_gradients(self: Any, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        """Takes a step with this rank's own gradients."""
        steps, given = self._allreduce_grads, list(grads_and_vars)

        def update() -> Any:
            return super(TakesOwnSteps, self).apply_gradients(given, *args, **kwargs)  # type: ignore[misc]

        if steps.is_stepping or not given:  # or a scaler around this one sees to the exchange
            steps.observe(given)
            return update()
        if self._local_vars:
            raise PluginError("a local variable cannot be used with StepAhead, which shares all of the optimizer's: "
                              "give local layers an optimizer of their own")
        _build(self, given)
        steps.step([v for _, v in given], given, update)
        return self.iterations


def taking_own_steps(optimizer: Any) -> Any:
    """A tf-keras optimizer's copy whose steps will be its own. Raises PluginError for one that cannot take them."""
    plain = type(optimizer)
    if isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        raise PluginError("in tf-keras loss scaling comes around the distributed optimizer: "
                          "LossScaleOptimizer(hvd.DistributedOptimizer(...))")
    cls = type(plain.__name__, (TakesOwnSteps, plain), {"__module__": plain.__module__})
    return cls.from_config(optimizer.get_config())  # type: ignore[attr-defined]


def install(broadcast: Any) -> None:
    """Wraps tf-keras' scalers and Horovod's callback; once. broadcast: what Horovod's callback does."""
    for cls in tf.keras.mixed_precision.LossScaleOptimizer.__subclasses__():
        cls.apply_gradients = _wrap_scaled_apply(cls.apply_gradients)
    broadcast.on_train_begin = _on_train_begin


def _wrap_scaled_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A scaler around ours: each worker looks for overflow by itself, and takes part in the exchange in any case."""
    @functools.wraps(apply)
    def wrapped(self: Any, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        steps = own_steps_of(self.inner_optimizer)
        if steps is None:
            return apply(self, grads_and_vars, *args, **kwargs)
        given = list(grads_and_vars)
        _build(self, given)
        if steps.averages:
            variables = [v for _, v in given]
            given = list(zip(steps([g for g, _ in given], variables), variables, strict=True))
        steps.step([v for _, v in given], [], lambda: apply(self, given, *args, **kwargs))
        return self.iterations

    return wrapped


def _build(optimizer: Any, given: list[tuple[Any, Any]]) -> None:
    with tf.init_scope():
        optimizer.build([v for _, v in given])


def _on_train_begin(self: Any, _logs: Any = None) -> None:
    """Horovod broadcasts after the first step; with StepAhead ranks must be equal before it."""
    model = self.model
    if own_steps_of(model) is not None and model.built:
        model.optimizer.build(model.trainable_variables)
        self.on_batch_end(0)

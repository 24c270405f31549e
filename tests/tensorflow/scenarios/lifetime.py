"""Nothing lives longer than its variables and optimizer: no thread, no memory, no model."""

from __future__ import annotations

import functools
import gc
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk import Partial, PluginError
from horovod_oktopk.tensorflow import OkTopk, StepAhead, synchronize_replicas
from horovod_oktopk.tensorflow.private import KERAS_3
from tests.scenarios.common import SHAPES, gradients, needs, raised_everywhere
from tests.scenarios.leaks import assert_nothing_stays
from tests.tensorflow.driver import Kind
from tests.tensorflow.scenarios.common import compiled, distribute, fit, make_model


def train(kind: str, compression: Any, steps: int = 2) -> Any:
    """Take steps of new variables, which are gone afterwards, but for what this returns."""
    trainer = Kind(kind)(compression)
    for step in range(steps):
        trainer.step(gradients(step, hvd.rank()))
    return trainer


def check_tapes_and_functions_that_are_dropped_leave_nothing() -> None:
    """TensorFlow keeps what a function's graph calls."""
    for kind, several in (("tape", 15), ("function", 5)):
        assert_nothing_stays(hvd, functools.partial(train, kind, OkTopk(density=0.1)), several)


def check_keras_optimizers_that_are_dropped_leave_nothing() -> None:
    """With StepAhead an exchange is under way then."""
    for compression in (OkTopk(density=0.1), StepAhead(OkTopk(density=0.1))):
        assert_nothing_stays(hvd, functools.partial(train, "keras", compression))


def check_partial_that_is_dropped_leaves_nothing() -> None:
    needs(KERAS_3 and hvd.mpi_enabled(), "Keras 3 and MPI")
    assert_nothing_stays(hvd, lambda: synchronize_replicas(train("keras", Partial(OkTopk(density=0.1))).target))


def check_models_that_fit_and_are_dropped_leave_nothing() -> None:
    def fitted(compression: Any) -> None:
        fit(compiled(make_model(), distribute(compression)), epochs=1)

    for compression in (OkTopk(density=0.1), StepAhead(OkTopk(density=0.1))):
        assert_nothing_stays(hvd, functools.partial(fitted, compression))


def check_a_model_that_fits_with_loss_scaling_and_is_dropped_leaves_nothing() -> None:
    needs(KERAS_3, "Keras 3")

    def fitted() -> None:
        scaler = tf.keras.mixed_precision.LossScaleOptimizer(distribute(StepAhead(OkTopk(density=0.1))))
        fit(compiled(make_model(), scaler), epochs=1)

    assert_nothing_stays(hvd, fitted)


def check_loss_scalers_of_other_compressions_are_not_kept() -> None:
    def scaled() -> Any:
        scaler = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
        variable = tf.Variable(1.0)
        return (scaler.scale_loss if KERAS_3 else scaler.get_scaled_loss)(variable * 2.0)

    assert_nothing_stays(hvd, scaled)


def check_a_graph_whose_optimizer_is_gone_says_so() -> None:
    trainer = train("function", OkTopk(density=0.1))
    given = {name: tf.constant(g) for name, g in gradients(3, hvd.rank(), shapes=SHAPES).items()}
    function = trainer.run.get_concrete_function(given)
    del trainer
    gc.collect()
    assert "are gone" in raised_everywhere(hvd, PluginError, lambda: function(given))[0]

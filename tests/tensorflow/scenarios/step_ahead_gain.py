"""The gain of `compression=StepAhead(...)` under both Keras: measured from what the optimizer applies."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_oktopk import Dense, OkTopk, StepAhead
from horovod_oktopk.tensorflow import shared_parameters, step_report
from horovod_oktopk.tensorflow.keras.callbacks import StepReportLogger
from horovod_oktopk.tensorflow.private import KERAS_3
from horovod_oktopk.tensorflow.variables import tensor_of
from tests.scenarios.common import assert_equal_everywhere, needs
from tests.tensorflow.scenarios.common import EAGER_AND_GRAPH, distribute, eager, fit, keras, variable_of
from tests.tensorflow.scenarios.step_ahead import model_with, take_steps

OPTIONS = StepAhead(OkTopk(density=0.05))
ALONE = StepAhead(Dense(), ahead=1, overlap=False)
"""Nothing but the optimizer's own steps."""
optimizers = keras.optimizers


def report_after(steps: int, optimizer: Any, options: StepAhead = OPTIONS, **arguments: Any) -> Any:
    model = model_with(options, optimizer, **arguments)
    take_steps(model, range(steps))
    report = step_report(model)
    assert_equal_everywhere(hvd, {"gain": np.array([report.gain])})
    return report


def check_optimizers_that_normalize_take_longer_steps() -> None:
    for is_eager in (False, True):
        for make in (optimizers.Adam, optimizers.RMSprop, optimizers.Nadam):
            report = report_after(3, make(0.01), run_eagerly=is_eager)
            assert (report.gain > 1) == (hvd.size() > 1), "the ranks' data differ"


def decayed(make: Any, gain: float | None, way: Any) -> np.ndarray:
    """Return ones after three steps with gradients of zeros; all of the user's decays are 0.5."""
    optimizer = distribute(StepAhead(Dense(), ahead=1, overlap=False, gain=gain), make())
    variable = variable_of(np.ones((3, 3), np.float32))
    optimizer.build([variable])

    def step() -> None:
        optimizer.apply_gradients([(tf.zeros((3, 3)), variable)])

    take = way(step)
    for _ in range(3):
        take()
    decays = {name: value for name, value in optimizer.get_config().items() if name.endswith("weight_decay")}
    assert all(value == getattr(optimizer, name) in (0.5, None) for name, value in decays.items()), decays
    return np.array(tf.convert_to_tensor(variable))


def check_weight_decay_is_as_without_a_gain() -> None:
    kinds = [lambda: optimizers.AdamW(0.1, weight_decay=0.5), lambda: optimizers.SGD(0.1, weight_decay=0.5)]
    if hasattr(optimizers, "Muon"):  # which has two: where it is Adam, and where it is not
        kinds += [lambda: optimizers.Muon(0.1, weight_decay=None, adam_weight_decay=0.5, exclude_layers=[".*"]),
                  lambda: optimizers.Muon(0.1, weight_decay=0.5, adam_weight_decay=None)]
    for make in kinds:
        for way in EAGER_AND_GRAPH:
            for gain in (None, 4.0):
                assert np.allclose(decayed(make, gain, way), 0.95 ** 3, rtol=1e-6), (make(), gain, way)


def moved_late(ahead: float, way: Any) -> np.ndarray:
    """Return ones after three of Adafactor's steps, 40,000 steps into a training."""
    optimizer = distribute(StepAhead(Dense(), ahead=ahead, overlap=False, gain=None),
                           optimizers.Adafactor(0.1, weight_decay=0.05, epsilon_1=1e-12))
    variable = variable_of(np.ones((3, 3), np.float32))
    optimizer.build([variable])
    tensor_of(optimizer.iterations).assign(40000)
    take = way(lambda gradient: optimizer.apply_gradients([(gradient, variable)]))
    for step in range(3):
        take(tf.constant(np.random.default_rng(step).standard_normal((3, 3)), tf.float32))
    with shared_parameters(optimizer):
        return np.array(tf.convert_to_tensor(variable))


def check_adafactors_steps_have_the_coefficient_late_in_a_training_too() -> None:
    """Its rate is min(lr, 1/√t): λ is a factor of what is used, and weight decay goes by lr."""
    for way in EAGER_AND_GRAPH:
        found = [moved_late(ahead, way) for ahead in (1, 0.5)]
        assert not np.allclose(found[0], 0.995 ** 3, atol=1e-3), "it moves by more than the decay"
        np.testing.assert_allclose(*found, rtol=3e-4)


def check_loss_scales_are_left_out_of_the_measurement() -> None:
    """Each rank's scaler has a scale of its own."""
    expected = report_after(4, optimizers.Adam(0.01), ALONE).noise_ratio
    scaler = keras.mixed_precision.LossScaleOptimizer
    scale = 2.0 ** (8 + hvd.rank())
    inner = optimizers.Adam(0.01)
    wrapped = (distribute(ALONE, scaler(inner, initial_scale=scale)) if KERAS_3 else
               scaler(distribute(ALONE, inner), initial_scale=scale))
    model = model_with()
    model.compile(wrapped, model.loss)
    take_steps(model, range(4))
    assert np.isclose(step_report(model).noise_ratio, expected, rtol=1e-3)


def ratio_of_a_table(is_sparse: bool, way: Any) -> float:
    """Return the ratio after steps whose gradients have some rows of a table, one of them twice; at last none."""
    shape = (50, 4, 2)
    table = variable_of(np.ones(shape, np.float32))
    other = variable_of(np.ones(30, np.float32))
    optimizer = distribute(ALONE, optimizers.SGD(0.1))
    optimizer.build([table, other])

    def step(rows: tf.Tensor, values: tf.Tensor) -> None:
        gradient = tf.IndexedSlices(values, rows, shape)
        given = gradient if is_sparse else tf.convert_to_tensor(gradient)
        optimizer.apply_gradients([(given, table), (tf.ones(30), other)])

    some = tf.TensorSpec((None,), tf.int32), tf.TensorSpec((None, *shape[1:]), tf.float32)
    take = step if way is eager else tf.function(step, input_signature=some)
    for number in range(5):
        rows = np.array([3, 3, 7, 10 + hvd.rank(), 20 + number] if number < 4 else [], np.int32)
        values = np.random.default_rng(number).standard_normal((len(rows), *shape[1:]))
        take(tf.constant(rows), tf.constant(values, tf.float32))
    return step_report(optimizer).noise_ratio


def check_a_sparse_gradient_is_measured_as_the_dense_one() -> None:
    for way in EAGER_AND_GRAPH:
        dense, sparse = (ratio_of_a_table(is_sparse, way) for is_sparse in (False, True))
        assert np.isclose(dense, sparse), (dense, sparse)
        assert (dense > 1) == (hvd.size() > 1)


def check_the_logs_have_the_gain() -> None:
    needs(hvd.size() > 1, "several ranks")
    model = model_with(OPTIONS, optimizers.Adam(0.01))
    logs = fit(model, [StepReportLogger()])
    assert 1 < logs["oktopk_gain"][-1] <= np.sqrt(hvd.size())
    assert logs["oktopk_noise_scale"][-1] > 0

"""The gain of `compression=StepAhead(...)` under both Keras: measured from what the optimizer applies."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import Dense, OkTopk, StepAhead
from horovod_oktopk.tensorflow import load_state, save_state, step_report
from horovod_oktopk.tensorflow.keras.callbacks import StepReportLogger
from horovod_oktopk.tensorflow.versions import KERAS_3
from tests.scenarios.common import assert_equal_everywhere, everywhere, needs, shared_folder
from tests.tensorflow.scenarios.common import distribute, fit, keras
from tests.tensorflow.scenarios.step_ahead import model_with, shared, take_steps

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


def check_an_optimizer_that_normalizes_takes_longer_steps_on_all_ranks_alike() -> None:
    for eager in (False, True):
        for make in (optimizers.Adam, optimizers.RMSprop, optimizers.Nadam):
            report = report_after(5, make(0.01), run_eagerly=eager)
            assert report.gain == np.sqrt(report.noise_ratio) <= np.sqrt(hvd.size())
            assert (report.gain > 1) == (hvd.size() > 1), "the ranks' data differ"


def check_an_optimizer_whose_steps_grow_with_the_gradient_has_no_gain() -> None:
    report = report_after(5, optimizers.SGD(0.1))
    assert report.gain == 1
    assert (report.noise_ratio > 1) == (hvd.size() > 1), "it is measured all the same"


def check_a_gain_is_a_factor_of_the_learning_rate() -> None:
    models = [model_with(StepAhead(Dense(), ahead=1, overlap=False, gain=gain), optimizers.Adam(rate))
              for gain, rate in ((2.0, 0.01), (None, 0.02))]
    for model in models:
        take_steps(model, range(3))
    assert np.allclose(shared(models[0]), shared(models[1]), atol=1e-6)
    assert np.isclose(float(models[0].optimizer.learning_rate), 0.01), "it is the user's again"


def check_weight_decay_is_as_without_a_gain() -> None:
    found = []
    for gain in (None, 4.0):
        optimizer = distribute(StepAhead(Dense(), ahead=1, overlap=False, gain=gain),
                               optimizers.AdamW(0.1, weight_decay=0.5))
        variable = tf.keras.Variable(np.ones(9, np.float32)) if KERAS_3 else tf.Variable(np.ones(9, np.float32))
        for _ in range(3):
            optimizer.apply_gradients([(tf.zeros(9), variable)])
        assert optimizer.weight_decay == optimizer.get_config()["weight_decay"] == 0.5
        found.append(np.array(tf.convert_to_tensor(variable)))
    assert np.allclose(found[0], 0.95 ** 3)
    assert np.allclose(*found, rtol=1e-6)


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


def check_a_sparse_gradient_is_measured_as_the_dense_one() -> None:
    ratios = []
    for is_sparse in (False, True):
        start = np.ones((50, 8), np.float32)
        table = tf.keras.Variable(start) if KERAS_3 else tf.Variable(start)
        optimizer = distribute(ALONE, optimizers.SGD(0.1))
        for step in range(4):
            rows = np.array([3, 3, 7, 10 + hvd.rank(), 20 + step])
            values = np.random.default_rng(step).standard_normal((5, 8)).astype(np.float32)
            dense = np.zeros_like(start)
            np.add.at(dense, rows, values)
            gradient = tf.IndexedSlices(values, rows, start.shape) if is_sparse else tf.constant(dense)
            optimizer.apply_gradients([(gradient, table)])
        ratios.append(step_report(optimizer).noise_ratio)
    assert np.isclose(*ratios), ratios
    assert (ratios[0] > 1) == (hvd.size() > 1)


def check_the_logs_have_the_gain() -> None:
    needs(hvd.size() > 1, "several ranks")
    model = model_with(OPTIONS, optimizers.Adam(0.01))
    logs = fit(model, [StepReportLogger()])
    assert 1 < logs["oktopk_gain"][-1] <= np.sqrt(hvd.size())
    assert logs["oktopk_noise_scale"][-1] > 0


def check_a_resumed_run_has_the_same_gain() -> None:
    with shared_folder(hvd) as folder:
        path = str(folder / f"{hvd.rank()}{'.keras' if KERAS_3 else '.h5'}")
        model = model_with(OPTIONS, optimizers.Adam(0.01))
        fit(model)
        model.save(path)
        save_state(model, folder / "state")
        resumed = hvd_keras.load_model(path, compression=OPTIONS)
        load_state(resumed, folder / "state")
        for each in (model, resumed):
            fit(each)
        everywhere(hvd, "done")
    assert step_report(model).gain == step_report(resumed).gain
    assert np.array_equal(shared(model), shared(resumed))

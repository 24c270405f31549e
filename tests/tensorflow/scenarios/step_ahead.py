"""`compression=StepAhead(...)` under both Keras: the optimizer's own steps, and models that show what ranks share."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import Dense, GaussianK, GTopk, OkTopk, StepAhead, TopkA, TopkDSA
from horovod_oktopk.tensorflow import shared_parameters, step_report
from tests.scenarios.common import assert_equal_everywhere
from tests.tensorflow.scenarios.common import compiled, distribute, fit, keras, make_data, make_model, weights

OPTIONS = StepAhead(OkTopk(density=0.05))
SCHEMES = (OkTopk(density=0.05), OkTopk(density=0.05, value_dtype="bfloat16"), TopkA(density=0.05),
           TopkDSA(density=0.05), GTopk(density=0.05), GaussianK(density=0.05), Dense())


def model_with(compression: Any = OPTIONS, optimizer: Any = None, seed: int = 1, **arguments: Any) -> Any:
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    return compiled(make_model(seed), distribute(compression, optimizer), **arguments)


def take_steps(model: Any, steps: range) -> None:
    """One batch for each step, without `fit`."""
    x, y = make_data()
    for step in steps:
        part = slice(8 * (step % 8), 8 * (step % 8) + 8)
        model.train_on_batch(x[part], y[part])


def own(model: Any) -> np.ndarray:
    """What the variables hold."""
    return np.concatenate([np.array(tf.convert_to_tensor(v)).ravel() for v in model.trainable_variables])


def shared(model: Any) -> np.ndarray:
    with shared_parameters(model):
        return own(model)


def check_every_scheme_keeps_the_shared_parameters_equal_at_every_step() -> None:
    for scheme in SCHEMES:
        for overlap in (True, False):
            model = model_with(StepAhead(scheme, overlap=overlap))
            for step in range(4):
                take_steps(model, range(step, step + 1))
                assert_equal_everywhere(hvd, {"w": shared(model)})
            report = step_report(model)
            assert report.step == 4
            assert report.bytes_sent > 0 or hvd.size() == 1


def check_dense_equals_horovods_dense_to_rounding() -> None:
    results = []
    for compression in (hvd.Compression.none, StepAhead(Dense(), ahead=1, overlap=False),
                        StepAhead(OkTopk(density=1.0), ahead=1, overlap=False)):
        model = model_with(compression)
        fit(model, epochs=3)
        results.append(own(model))
    assert np.allclose(results[0], results[1], rtol=0, atol=1e-6), np.abs(results[0] - results[1]).max()
    assert np.allclose(results[0], results[2], rtol=0, atol=1e-6), np.abs(results[0] - results[2]).max()


def check_fit() -> None:
    model = model_with()
    history = fit(model, epochs=6, validation_data=make_data())
    assert history["loss"][-1] < history["loss"][0]
    assert_equal_everywhere(hvd, weights(model))
    print(hvd_keras.step_report(model).step)

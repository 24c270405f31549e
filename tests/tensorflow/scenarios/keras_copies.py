"""Keras 3: copies of distributed optimizers are distributed; files hold the plain ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk.tensorflow import OkTopk, step_report
from horovod_oktopk.tensorflow.registry import gradient_reducer_of, reducers_of
from horovod_oktopk.tensorflow.versions import KERAS_3
from tests.scenarios.common import assert_equal_everywhere, needs, shared_folder
from tests.tensorflow.scenarios.common import compiled, distribute, fit, keras, make_model, weights

OPTIONS = OkTopk(density=0.1)
Scaler = keras.mixed_precision.LossScaleOptimizer


@keras.utils.register_keras_serializable("tests", "Own")
class OwnOptimizer(keras.optimizers.SGD):  # type: ignore[misc]
    """Registered under another name than its own."""


def again(optimizer: Any) -> Any:
    return type(optimizer).from_config(optimizer.get_config())


def pickled(target: Any) -> Any:
    return pickle.loads(pickle.dumps(target))


def cloned(model: Any) -> Any:
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    clone.compile_from_config(model.get_compile_config())
    return clone


def assert_trains_with_the_others(model: Any, original: Any) -> None:
    assert gradient_reducer_of(model) is not gradient_reducer_of(original)
    assert gradient_reducer_of(model).op == hvd.Sum
    fit(model, epochs=1)
    assert step_report(model).step == 4
    assert_equal_everywhere(hvd, weights(model))
    assert not set(reducers_of(model)) & set(reducers_of(original))


def optimizers() -> list[Any]:
    plain = keras.optimizers.SGD(0.01, momentum=0.5)
    return [distribute(OPTIONS, plain, op=hvd.Sum), distribute(OPTIONS, OwnOptimizer(0.01), op=hvd.Sum),
            Scaler(distribute(OPTIONS, keras.optimizers.SGD(0.01), op=hvd.Sum)),
            distribute(OPTIONS, Scaler(keras.optimizers.SGD(0.01)), op=hvd.Sum)]


def check_copies_of_optimizers_are_distributed() -> None:
    needs(KERAS_3, "Keras 3")
    for optimizer in optimizers():
        ways: list[Callable[[Any], Any]] = [copy.deepcopy, pickled]
        if gradient_reducer_of(optimizer) is getattr(optimizer, "_allreduce_grads", None):
            ways.append(again)
        for strategy in ways:
            other = strategy(optimizer)
            assert type(other).__name__ == type(optimizer).__name__
            assert other.get_config() == optimizer.get_config()
            assert_trains_with_the_others(compiled(make_model(), other), optimizer)


def check_copies_of_models_are_distributed() -> None:
    needs(KERAS_3, "Keras 3")
    for optimizer in optimizers():
        model = compiled(make_model(), optimizer)
        fit(model, epochs=1)
        for strategy in (copy.deepcopy, pickled, cloned):
            other = strategy(model)
            assert all(map(np.array_equal, other.get_weights(), model.get_weights()))
            assert_trains_with_the_others(other, model)


def check_a_registered_optimizer_is_saved_and_loaded() -> None:
    needs(KERAS_3, "Keras 3")
    with shared_folder(hvd) as folder:
        model = compiled(make_model(), distribute(OPTIONS, OwnOptimizer(0.01), op=hvd.Sum))
        fit(model, epochs=1)
        path = folder / f"model{hvd.rank()}.keras"
        model.save(path)
        assert type(keras.models.load_model(path).optimizer) is OwnOptimizer
        loaded = hvd_keras.load_model(path, compression=OPTIONS, op=hvd.Sum)
    assert_trains_with_the_others(loaded, model)

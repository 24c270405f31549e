"""Which models, optimizers and variables `shared_parameters` and its like take; what is none of these is refused."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd

from horovod_oktopk import PluginError
from horovod_oktopk.tensorflow import load_state, shared_parameters, step_report, synchronize_replicas
from tests.scenarios.common import raised_everywhere
from tests.tensorflow.scenarios.common import keras, make_model
from tests.tensorflow.scenarios.step_ahead import model_with, own, shared, take_steps


def inside(model: Any, *targets: Any) -> bytes:
    """What the model holds inside `shared_parameters(*targets)`."""
    with shared_parameters(*targets):
        return own(model).tobytes()


def check_lists_and_single_variables_serve_as_the_model_does() -> None:
    model, other = model_with(), make_model(2)
    take_steps(model, range(3))
    expected = shared(model).tobytes()
    assert hvd.size() == 1 or own(model).tobytes() != expected
    first = model.trainable_variables[0]
    for target in ([model], (other, [model]), [model.optimizer], model.layers, first, [first], [first, other],
                   model.trainable_variables):
        assert inside(model, target) == expected, target
    assert inside(model, other) == own(model).tobytes()
    assert inside(model) == inside(model, []) == own(model).tobytes()


def check_what_has_no_variables_is_refused() -> None:
    model = model_with()
    take_steps(model, range(1))
    for wrong, name in ((None, "NoneType"), ([None], "NoneType"), ({"model": model}, "dict"), ("model", "str"),
                        (keras.optimizers.SGD, "type"), (model.get_weights(), "ndarray")):
        for function in (lambda wrong: inside(model, wrong), synchronize_replicas):
            message = raised_everywhere(hvd, PluginError, lambda wrong=wrong, function=function: function(wrong))[0]
            assert f"got {name}" in message, message
            assert "(model)" in message
    for function in (step_report, lambda target: load_state(target, "file")):
        raised_everywhere(hvd, PluginError, lambda function=function: function([model]))
    with shared_parameters(keras.layers.Dense(3), make_model(2), keras.optimizers.SGD()):
        synchronize_replicas(model, model.trainable_variables, keras.optimizers.SGD())

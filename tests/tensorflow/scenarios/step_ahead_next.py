"""`compression=StepAhead(...)`: one optimizer follows another, or a model does not know the one that trains it."""

from __future__ import annotations

import gc
import itertools
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.elastic as tensorflow_elastic
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import Dense, OkTopk, StepAhead
from horovod_oktopk.tensorflow import load_state, save_state, shared_parameters, step_report
from horovod_oktopk.tensorflow.registry import each_run_of
from horovod_oktopk.tensorflow.variables import tensor_of
from tests.scenarios.common import assert_equal_everywhere, logged, shared_folder
from tests.tensorflow.scenarios.common import (
    broadcast,
    compiled,
    distribute,
    fit,
    keras,
    make_data,
    make_model,
    refusal,
)
from tests.tensorflow.scenarios.step_ahead import OPTIONS, assert_shared_is_equal, model_with, own, shared, take_steps


def check_a_new_optimizer_begins_with_what_ranks_share() -> None:
    model = model_with()
    take_steps(model, range(3))
    expected, before = shared(model), model.optimizer  # which is not gone yet
    compiled(model, distribute(StepAhead(Dense(), ahead=1, overlap=False), keras.optimizers.Adam(0.0)))
    take_steps(model, range(1))
    assert np.array_equal(shared(model), expected)
    assert step_report(before).step == 3
    other = distribute(OPTIONS)
    other.build(model.trainable_variables)
    other.apply_gradients([(tf.ones(v.shape), v) for v in model.trainable_variables])
    assert_shared_is_equal(model)


def check_a_next_optimizer_begins_with_what_ranks_share_though_the_first_is_gone() -> None:
    for compression, is_gone in itertools.product((OPTIONS, OkTopk(density=0.05), Dense()), (True, False)):
        model = make_model()
        optimizer = distribute(OPTIONS, keras.optimizers.SGD(0.1, momentum=0.9))
        step_by(optimizer, model)
        expected, kept = shared(model), optimizer
        if is_gone:
            del kept
        optimizer = distribute(compression, keras.optimizers.SGD(0.0))
        gc.collect()
        step_by(optimizer, model, steps=1)
        assert np.array_equal(shared(model), expected)
        optimizer.learning_rate.assign(0.1)
        step_by(optimizer, model)
        assert not np.array_equal(shared(model), expected)
        assert_shared_is_equal(model)


def check_a_former_optimizer_has_no_say_in_the_next_training() -> None:
    for dense in (True, False):
        model = model_with()
        fit(model, [broadcast()], epochs=1)
        compiled(model, distribute(Dense()) if dense else keras.optimizers.SGD(0.1))
        ends: list[bytes] = []
        with logged() as lines:
            fit(model, [broadcast(), keras.callbacks.LambdaCallback(
                on_epoch_end=lambda *_, model=model, ends=ends: ends.append(own(model).tobytes()))], epochs=3)
        assert len(set(ends)) == 3, "an epoch is undone"
        assert any("the model's optimizer is not distributed" in line for line in lines) != dense, lines
        assert each_run_of(model) == []


def step_by(optimizer: Any, model: Any, steps: int = 3) -> None:
    """Take steps in a loop of one's own: the model knows nothing of the optimizer."""
    x, y = make_data()
    for step in range(steps):
        with tf.GradientTape() as tape:
            part = slice(8 * step, 8 * step + 8)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y[part], model(x[part]))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def check_the_state_of_a_model_that_is_not_compiled() -> None:
    for compression, target in itertools.product((OPTIONS, OkTopk(density=0.05)), ("model", "optimizer")):
        model, optimizer = make_model(), distribute(compression)
        step_by(optimizer, model)
        by_name = {"model": model, "optimizer": optimizer}
        with shared_folder(hvd) as folder:
            path = str(Path(folder) / "state.npz")
            with shared_parameters(model):
                saved = model.get_weights()
                save_state(by_name[target], path)
            step_by(optimizer, model)
            expected = shared(model)
            with shared_parameters(model):
                model.set_weights(saved)
                load_state(by_name[target], path)
            step_by(optimizer, model)
            assert np.array_equal(shared(model), expected)
            assert step_report(model).step == 6
        another = distribute(compression)  # whose state is not that of the file, which is gone
        step_by(another, model)
        shared(model)
        assert step_report(model).step == step_report(another).step == 3


def check_states_of_optimizers_that_take_turns_are_loaded_together() -> None:
    """Load them into new ones and those that have gone on, whichever has the turn: bits are the same."""
    with shared_folder(hvd) as folder:
        paths = [str(Path(folder) / name) for name in ("first.npz", "second.npz")]
        model, (first, second) = make_model(), taking_turns()
        step_by(first, model)
        step_by(second, model)
        with shared_parameters(model):
            saved = model.get_weights()
            save_state(first, paths[0])
            save_state(second, paths[1])
        for each in (second, first, second):
            step_by(each, model)
        expected = shared(model)
        for case in (None, first, second):
            if case is None:
                other, optimizers = make_model(), taking_turns()
                for each in optimizers:
                    step_by(each, other)
            else:
                other, optimizers = model, (first, second)
                step_by(case, other)
            with shared_parameters(other):
                other.set_weights(saved)
                for each, path in zip(optimizers, paths, strict=True):
                    load_state(each, path)
            assert_shared_is_equal(other)
            for number in (1, 0, 1):
                step_by(optimizers[number], other)
            assert np.array_equal(shared(other), expected)


def check_a_state_that_waits_stays_while_another_optimizer_steps() -> None:
    """Ask for it outside of a block; the other's turn comes first."""
    with shared_folder(hvd) as folder:
        path = str(Path(folder) / "state.npz")
        model, (first, second) = make_model(), taking_turns()
        for each in (first, second):
            step_by(each, model)
        with shared_parameters(model):
            save_state(second, path)
        load_state(second, path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step_by(first, model)
            step_by(second, model)
        assert_shared_is_equal(model)
        assert step_report(second).step == 6


def check_blocks_inside_blocks_show_what_ranks_share_though_a_state_is_loaded() -> None:
    with shared_folder(hvd) as folder:
        path = str(Path(folder) / "state.npz")
        model = model_with(optimizer=keras.optimizers.SGD(0.1))
        take_steps(model, range(4))
        with shared_parameters(model):
            saved = model.get_weights()
            save_state(model, path)
        take_steps(model, range(4, 8))
        expected = shared(model)
        for is_new in (True, False):
            model = model_with(optimizer=keras.optimizers.SGD(0.1)) if is_new else model
            with shared_parameters(model):
                with shared_parameters(model.optimizer):
                    model.set_weights(saved)
                    load_state(model, path)
                assert_equal_everywhere(hvd, {"w": own(model)})
                assert "shared_parameters" in refusal(lambda model=model: take_steps(model, range(1)))
            take_steps(model, range(4, 8))
            assert np.array_equal(shared(model), expected)


def check_a_block_of_all_inside_one_of_a_part_takes_states_when_both_have_ended() -> None:
    with shared_folder(hvd) as folder:
        model, optimizers = make_model(), taking_turns()
        paths = [str(Path(folder) / f"{number}.npz") for number in range(2)]
        lists = [layer.trainable_variables for layer in model.layers if layer.trainable_variables][:2]

        def train(count: int) -> None:
            for number in range(count):
                for optimizer, variables in zip(optimizers, lists, strict=True):
                    gradients = [tf.fill(v.shape, 0.1 * (1 + number + hvd.rank())) for v in variables]
                    optimizer.apply_gradients(zip(gradients, variables, strict=True))

        train(3)
        with shared_parameters(model):
            saved = model.get_weights()
            for optimizer, path in zip(optimizers, paths, strict=True):
                save_state(optimizer, path)
        train(2)
        expected = shared(model)
        with shared_parameters(optimizers[1]), shared_parameters(model):
            model.set_weights(saved)
            for optimizer, path in zip(optimizers, paths, strict=True):
                load_state(optimizer, path)
        train(2)
        assert np.array_equal(shared(model), expected)


def check_a_fit_that_failed_inside_a_block_is_followed_by_another() -> None:
    """Its traceback is kept, as notebooks do, and with it the blocks that the callback had opened."""
    model, kept = model_with(), []

    def fail(*_: Any) -> None:
        raise KeyError

    try:
        fit(model, [broadcast(), keras.callbacks.LambdaCallback(on_epoch_end=fail)])
    except KeyError as error:
        kept.append(error)
    fit(model, [broadcast()])
    assert_shared_is_equal(model)
    assert kept


def check_an_elastic_state_restores_optimizers_that_take_turns() -> None:
    model, (first, second) = make_model(), taking_turns()
    step_by(first, model)
    state = tensorflow_elastic.TensorFlowState(list(map(tensor_of, model.trainable_variables)))
    state.save()
    expected = shared(model)
    step_by(second, model)
    state.restore()
    assert [each_run_of(each)[0].mode.is_started for each in (first, second)] == [True, False]
    assert np.array_equal(shared(model), expected)
    for each in (second, first):
        step_by(each, model)
    assert_shared_is_equal(model)


def check_an_elastic_state_of_another_optimizer_keeps_the_residual_of_the_models_own() -> None:
    first, second = taking_turns()
    model = compiled(make_model(), first)
    second.build(model.trainable_variables)

    def trained(*optimizers: Any) -> np.ndarray:
        for each in optimizers:
            step_by(each, model)
        return shared(model)

    trained(first, second)
    state = hvd_keras.KerasState(model, optimizer=second)
    after = trained(second, first, second)
    state.restore()
    assert np.array_equal(trained(second, first, second), after)


def check_a_block_that_ends_by_an_error_after_a_load_leaves_what_ranks_share() -> None:
    with shared_folder(hvd) as folder:
        path = str(Path(folder) / "state.npz")
        model = model_with()
        take_steps(model, range(4))
        with shared_parameters(model):
            saved = model.get_weights()
            save_state(model, path)
        take_steps(model, range(3))
        with suppress(KeyError), shared_parameters(model):
            model.set_weights(saved)
            load_state(model, path)
            raise KeyError
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            take_steps(model, range(2))
        assert_shared_is_equal(model)
        assert step_report(model).step == 6


def taking_turns() -> tuple[Any, Any]:
    return distribute(OPTIONS), distribute(StepAhead(OkTopk(density=0.2)))

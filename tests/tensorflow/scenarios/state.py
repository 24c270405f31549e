"""Elastic states, saved models and the checkpoint callback: the residual goes with the variables."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.elastic import TensorFlowKerasState, TensorFlowState

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import AgreementError, OptionError, PluginError
from horovod_oktopk.tensorflow import OkTopk, StepAhead, load_state, save_state, step_report
from horovod_oktopk.tensorflow.private import KERAS_3
from horovod_oktopk.tensorflow.registry import each_run_of
from tests.scenarios.common import (
    assert_equal_everywhere,
    everywhere,
    flat,
    gradients,
    logged,
    needs,
    needs_ranks,
    raised_everywhere,
    shared_folder,
)
from tests.support.full_disk import room_for
from tests.tensorflow.driver import Kind
from tests.tensorflow.scenarios.common import (
    broadcast,
    compiled,
    distribute,
    keras,
    make_data,
    make_model,
    reduced,
    weights,
)

OPTIONS = OkTopk(density=0.1, selection="reuse", threshold_interval=4, region_interval=5)


def residual(target: Any) -> np.ndarray:
    return each_run_of(target)[0].mode.read_residual()


def fresh_model(options: Any = OPTIONS) -> Any:
    return compiled(make_model(), distribute(options, keras.optimizers.SGD(0.1, momentum=0.5)))


def train(model: Any, epochs: range, callbacks: Any = (), steps: int = 1) -> None:
    """Fit the model. steps: in each epoch."""
    x, y = make_data()
    model.fit(x, y, batch_size=64 // steps, shuffle=False, initial_epoch=epochs.start, epochs=epochs.stop, verbose=0,
              callbacks=list(callbacks))


def check_keras_state_restores_residual_and_counter() -> None:
    kinds = (hvd_keras.KerasState, *(() if KERAS_3 else (TensorFlowKerasState,)))
    for make in kinds:
        model = fresh_model()
        state = make(model, epoch=0)
        state.sync()
        train(model, range(3))
        state.save()
        train(model, range(3, 7))
        expected, held = flat(weights(model)), residual(model)
        state.restore()
        assert not np.array_equal(flat(weights(model)), expected)
        train(model, range(3, 7))
        assert step_report(model).step == 7
        assert np.array_equal(flat(weights(model)), expected)
        assert np.array_equal(residual(model), held)


def check_a_state_from_before_the_first_step_is_restored() -> None:
    model = fresh_model()
    state = hvd_keras.KerasState(model, epoch=0)
    train(model, range(2))
    state.restore()
    assert not residual(model).any()
    train(model, range(1))
    assert step_report(model).step == 1


def check_tensorflow_state_of_tape_variables() -> None:
    trainer = Kind("function")(OPTIONS)
    state = TensorFlowState(list(trainer.variables.values()))

    def take_steps(steps: range) -> np.ndarray:
        for step in steps:
            trainer.step(gradients(step, hvd.rank()))
        return flat(trainer.values())

    take_steps(range(3))
    state.save()
    expected = take_steps(range(3, 7))
    state.restore()
    assert np.array_equal(take_steps(range(3, 7)), expected)
    assert trainer.report().step == 7


def check_a_saved_model_resumes_with_the_same_bits() -> None:
    """All load what rank 0 has saved, and residuals from a file of their own. With StepAhead a rank's momentum is its
    own, so each saves its model."""
    names = ("model.keras",) if KERAS_3 else ("model.h5", "saved_model")
    for options, name in itertools.product((OPTIONS, StepAhead(OPTIONS)), names):
        with shared_folder(hvd) as folder:
            writer = hvd.rank() if isinstance(options, StepAhead) else 0
            path = str(folder / f"{writer}-{name}")
            model = fresh_model(options)
            train(model, range(3), [broadcast()], steps=4)
            if hvd.rank() == writer:
                model.save(path)
            save_state(model, folder / "residuals")
            loaded = hvd_keras.load_model(path, compression=options)
            load_state(loaded, folder / "residuals")
            for each in (model, loaded):
                train(each, range(3, 6), [broadcast()], steps=4)
            everywhere(hvd, "done")
        assert step_report(loaded).step == 24
        assert_equal_everywhere(hvd, weights(loaded))
        if name != "saved_model":  # in which tf-keras keeps no momentum
            assert np.array_equal(flat(weights(loaded)), flat(weights(model)))


def check_a_model_that_rank_0_alone_loads_is_refused_on_all_ranks() -> None:
    """Keras 3 gives a loaded model's variables names of their own."""
    needs(KERAS_3, "Keras 3")
    needs_ranks(hvd)

    def resume(options: Any, path: Path) -> None:
        model = fresh_model(options)
        if hvd.rank() == 0:
            model.save(path)
            model = hvd_keras.load_model(path, compression=options)
        train(model, range(1), [broadcast()])

    for options in (OPTIONS, StepAhead(OPTIONS)):
        with shared_folder(hvd) as folder:
            for message in raised_everywhere(hvd, AgreementError, partial(resume, options, folder / "model.keras")):
                assert "ranks disagree on options or parameters (names" in message


def check_what_rank_0_alone_restores_into_its_model_is_everywhere() -> None:
    for options in (OPTIONS, StepAhead(OPTIONS)):
        with shared_folder(hvd) as folder:
            trained = fresh_model(options)
            train(trained, range(3), [broadcast()])
            resumed = compiled(make_model(seed=2 + hvd.rank()), distribute(options, keras.optimizers.SGD(0.1, 0.5)))
            if hvd.rank() == 0:
                path = tf.train.Checkpoint(model=trained).write(str(folder / "checkpoint"))
                tf.train.Checkpoint(model=resumed).read(path)
            found: list[Any] = []
            train(resumed, range(3, 5), [broadcast(), keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs, m=resumed, found=found: found.append(flat(weights(m))))])
            starts = everywhere(hvd, np.array_equal(found[0], flat(weights(trained))))
        assert starts == [True] * hvd.size()
        assert everywhere(hvd, int(resumed.optimizer.iterations.numpy())) == [5] * hvd.size()
        assert_equal_everywhere(hvd, weights(resumed))


@keras.utils.register_keras_serializable("tests", "Own")
class OwnOptimizer(keras.optimizers.SGD):  # type: ignore[misc]
    """Registered under another name than its own."""


def check_a_saved_model_loads_without_the_plugin() -> None:
    for kind in (keras.optimizers.SGD, OwnOptimizer) if KERAS_3 else (keras.optimizers.SGD,):
        with shared_folder(hvd) as folder:
            model = compiled(make_model(), distribute(OPTIONS, kind(0.1)))
            train(model, range(1))
            path = folder / f"model{hvd.rank()}{'.keras' if KERAS_3 else '.h5'}"
            model.save(path)
            loaded = keras.models.load_model(str(path))
            assert type(loaded.optimizer) is kind
            assert np.array_equal(flat(weights(loaded)), flat(weights(model)))


class Killed(keras.callbacks.Callback):
    """Ends training in the fifth epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 4:
            raise InterruptedError


def check_checkpoint_callbacks_resume_with_the_same_bits() -> None:
    for options in (OPTIONS, StepAhead(OPTIONS)):
        uninterrupted = fresh_model(options)
        train(uninterrupted, range(6), [broadcast()], steps=4)
        with shared_folder(hvd) as folder:
            def callbacks(folder: Path = folder) -> list[Any]:
                backup = keras.callbacks.BackupAndRestore(str(folder / f"backup{hvd.rank()}"))
                return [broadcast(), backup, hvd_keras.callbacks.StateCheckpoint(folder / "residuals")]

            with contextlib.suppress(InterruptedError):
                train(fresh_model(options), range(6), [*callbacks(), Killed()], steps=4)
            resumed = fresh_model(options)
            train(resumed, range(6), callbacks(), steps=4)
            everywhere(hvd, "done")
        assert step_report(resumed).step == 24
        assert np.array_equal(flat(weights(resumed)), flat(weights(uninterrupted)))


def check_files_of_save_state_and_broken_ones_can_be_given_to_the_callback() -> None:
    with shared_folder(hvd) as folder:
        model = fresh_model()
        train(model, range(2))
        save_state(model, folder / "state")
        resumed = fresh_model()
        train(resumed, range(1), [hvd_keras.callbacks.StateCheckpoint(folder / "other", restore=folder / "state")])
        assert step_report(resumed).step == 3
        if hvd.rank() == 0:
            (folder / "broken").write_bytes(b"no archive")
        broken = fresh_model()
        train(broken, range(1), [hvd_keras.callbacks.StateCheckpoint(folder / "other", restore=folder / "broken")])
        everywhere(hvd, "done")
    assert step_report(broken).step == 1


def check_checkpoint_files_carry_the_epoch_and_the_logs_and_leave_nothing_else() -> None:
    with shared_folder(hvd) as folder:
        losses: list[float] = []
        spy = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: losses.append(float(logs["loss"])))
        train(fresh_model(), range(2), [spy, hvd_keras.callbacks.StateCheckpoint(folder / "{epoch:02d}-{loss:.4f}")])
        expected = [f"{epoch:02}-{loss:.4f}" for epoch, loss in enumerate(everywhere(hvd, losses)[0], 1)]
        assert sorted(path.name for path in Path(folder).iterdir()) == expected
        callbacks = [hvd_keras.callbacks.StateCheckpoint(folder / "{los:.2f}")]
        message = raised_everywhere(hvd, OptionError, lambda: train(fresh_model(), range(1), callbacks))[0]
    assert "KeyError: 'los'" in message
    assert "'loss'" in message


def check_a_file_that_is_not_taken_leaves_residuals_as_they_are() -> None:
    with shared_folder(hvd) as folder:
        model = fresh_model()
        train(model, range(2), [hvd_keras.callbacks.StateCheckpoint(folder / "residuals")])
        train(model, range(2, 3))
        held = residual(model)
        with logged() as messages:
            callback = hvd_keras.callbacks.StateCheckpoint(folder / "other", restore=folder / "residuals")
            train(model, range(3, 4), [callback])
        everywhere(hvd, "done")
    assert held.any()
    assert step_report(model).step == 4
    if hvd.rank() == 0:
        assert any("residuals stay as they are" in message and "is of step 2" in message for message in messages)


def check_a_file_that_is_not_there_is_an_error_on_all_ranks() -> None:
    with shared_folder(hvd) as folder:
        weight = tf.Variable(tf.ones(3), name="weight")
        load_state([weight], folder / "nothing")
        messages = raised_everywhere(hvd, OptionError, lambda: reduced([weight], lambda: tf.reduce_sum(weight)))
        assert "nothing" in messages[0]


def check_training_goes_on_as_without_the_save_where_the_disk_is_full() -> None:
    def fails_to_save(model: Any, path: Path, limit: int) -> None:
        with room_for(limit) if hvd.rank() == 0 else contextlib.nullcontext():
            messages = raised_everywhere(hvd, OSError, lambda: save_state(model, path))
        assert len(set(messages)) == 1, messages
        assert "rank 0 could not save the state" in messages[0]

    for options in (OPTIONS, StepAhead(OPTIONS)):
        with shared_folder(hvd) as folder:
            trained = []
            for is_full in (False, True):
                model = fresh_model(options)
                train(model, range(2))
                save_state(model, folder / "state")
                length = everywhere(hvd, (folder / "state").stat().st_size)[0]
                for step, limit in enumerate((length - 1, length - 100, 2 * length // 3, length // 3, 0), 2):
                    if is_full:
                        fails_to_save(model, folder / "state", limit)
                        assert [path.name for path in Path(folder).iterdir()] == ["state"]
                    train(model, range(step, step + 1))
                trained.append((flat(weights(model)), each_run_of(model)[0].mode.records()[0]["residual"]))
            for expected, found in zip(*trained, strict=True):
                assert expected.tobytes() == found.tobytes(), options
            everywhere(hvd, "done")


def check_a_residual_of_another_dtype_is_converted_on_all_ranks() -> None:
    for written, read in ((tf.float64, tf.float32), (tf.float32, tf.float64)):
        with shared_folder(hvd) as folder:
            variable = {dtype: tf.Variable(tf.zeros(50, dtype), name="weight") for dtype in (written, read)}

            def step(dtype: Any, number: int, variable: Any = variable) -> None:
                factors = tf.constant(np.random.default_rng((number, hvd.rank())).integers(-9, 10, 50), dtype)
                reduced([variable[dtype]], lambda: tf.reduce_sum(variable[dtype] * factors), OkTopk(density=0.06))

            step(written, 0)
            held = residual([variable[written]])
            save_state([variable[written]], folder / "state")
            everywhere(hvd, "written")
            load_state([variable[read]], folder / "state")
            step(read, 1)
            saved, step_found = residual([variable[read]]), step_report([variable[read]]).step
            step(written, 1)
            assert held.any()
            assert step_found == 2
            assert np.array_equal(saved, residual([variable[written]]))
            everywhere(hvd, "done")


def check_a_second_phase_of_tapes_goes_on_where_the_file_has_one_alone() -> None:
    with shared_folder(hvd) as folder:
        first, second = (tf.Variable(tf.ones(9), name=name) for name in ("first", "second"))

        def step(variable: Any) -> None:
            reduced([variable], lambda: tf.reduce_sum(variable * tf.range(9.0)), OkTopk(density=0.2))

        step(first)
        save_state([first, second], folder / "state")
        everywhere(hvd, "written")
        load_state([first, second], folder / "state")
        step(first)
        step(second)
        assert each_run_of([second])[0].mode.report.step == 1
        assert each_run_of([first])[0].mode.report.step == 2
        everywhere(hvd, "done")


def check_arguments_that_are_swapped_are_told() -> None:
    with shared_folder(hvd) as folder:
        messages = raised_everywhere(hvd, PluginError, lambda: save_state(str(folder / "state"), [tf.Variable(0.0)]))
        assert messages[0].startswith("save_state takes models"), messages
        raised_everywhere(hvd, TypeError, lambda: save_state([tf.Variable(0.0)], 5))

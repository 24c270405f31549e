"""Programs of Keras that differ from the usual one: other orders of callbacks, models, shards and arguments."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as stock_keras
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import AgreementError, Dense, Partial
from horovod_oktopk.tensorflow import OkTopk, StepAhead, shared_parameters, step_report
from horovod_oktopk.tensorflow.private import KERAS_3
from tests.scenarios.common import (
    DENSE,
    assert_equal_everywhere,
    everywhere,
    flat,
    is_last,
    logged,
    needs,
    needs_ranks,
    raised_everywhere,
    shared_folder,
)
from tests.tensorflow.scenarios.common import (
    broadcast,
    compiled,
    distribute,
    fit,
    keras,
    make_data,
    make_model,
    refusal,
    weights,
)

AHEAD = StepAhead(OkTopk(density=0.1))


def early_stopping() -> Any:
    """Return the callback, as it puts back the first epoch's parameters: a loss of the ranks' own never falls."""
    return keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)


def check_callbacks_before_the_broadcast_see_what_all_ranks_share() -> None:
    needs_ranks(hvd)
    for callbacks in ([early_stopping(), broadcast()], [broadcast(), early_stopping()]):
        model = compiled(make_model(), distribute(AHEAD))
        fit(model, callbacks, epochs=4)
        assert_equal_everywhere(hvd, weights(model))


def check_a_model_that_was_compiled_before_is_to_be_compiled_again() -> None:
    """Otherwise it would go on as it has trained, before its optimizer was distributed: each rank for itself."""
    for compression in (OkTopk(density=0.1), AHEAD):
        model = compiled(make_model(), keras.optimizers.SGD(0.1))
        fit(model)
        distribute(compression, model.optimizer)
        assert "call model.compile(...) after" in refusal(functools.partial(fit, model, [broadcast()]))
        compiled(model, model.optimizer)
        fit(model, [broadcast()])
        assert step_report(model).step > 0
        assert_equal_everywhere(hvd, weights(model))


def check_a_rank_that_ends_fit_early_is_named() -> None:
    needs_ranks(hvd)
    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", is_last(hvd)))
    for compression in (OkTopk(density=0.1), AHEAD, *[Partial(OkTopk(density=0.1))] * hvd.mpi_enabled()):
        model = compiled(make_model(), distribute(compression))
        messages = raised_everywhere(hvd, AgreementError, functools.partial(fit, model, [broadcast(), stop]))
        assert all("end fit" in each or "the end of fit" in each for each in messages), messages


class FewerSteps(keras.callbacks.Callback):
    """Changes what Horovod's UpdateBatchStateCallback does after a reset: the number of steps."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.params["steps"] = 2


def check_an_epoch_may_have_more_batches_than_keras_says() -> None:
    model = compiled(make_model(), distribute(AHEAD))
    fit(model, [broadcast(), FewerSteps()])
    assert step_report(model).step == 8
    assert_equal_everywhere(hvd, weights(model))


def check_own_parameters_that_are_put_back_at_the_end_are_told() -> None:
    """Keras does not know the length of an epoch here, so a callback before the broadcast sees a rank's own."""
    needs_ranks(hvd)
    data = make_data()
    batches = tf.data.Dataset.from_generator(
        lambda: zip(*(np.split(each, 4) for each in data), strict=True),
        output_signature=(tf.TensorSpec((16, 20)), tf.TensorSpec((16,), tf.int64)))

    def train() -> None:
        model = compiled(make_model(), distribute(AHEAD))
        keep: list[Any] = []
        model.fit(batches, epochs=1, verbose=0, callbacks=[keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: keep.append(model.get_weights()),
            on_train_end=lambda logs: model.set_weights(keep[0])), broadcast()])

    assert "EarlyStopping(restore_best_weights=True)" in raised_everywhere(hvd, AgreementError, train)[0]


def check_a_rank_without_a_batch_is_named() -> None:
    needs_ranks(hvd)
    needs(KERAS_3, "Keras 3, as tf-keras refuses data without a batch itself")
    for compression in (AHEAD, OkTopk(density=0.1)):
        model = compiled(make_model(), distribute(compression))
        x, y = make_data(0 if hvd.rank() == 1 else 64)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
        try:
            model.fit(data, epochs=1, verbose=0, callbacks=[
                broadcast(), hvd_keras.callbacks.MetricAverageCallback()])
            said = "nothing"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        for each in everywhere(hvd, said):
            assert "AgreementError" in each, each
            assert "ranks [1] broadcast variables at the end of an epoch" in each, each


class Own(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Dense(24, activation="relu"), keras.layers.Dense(4)

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))


def check_a_model_that_says_it_is_built_and_has_no_variables_trains() -> None:
    for compression in (AHEAD, OkTopk(density=0.1)):
        keras.utils.set_random_seed(1)
        model = Own()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras tells that it could not build the layers
            model.build((None, 20))
        fit(compiled(model, distribute(compression)), [broadcast()])
        assert_equal_everywhere(hvd, weights(model))


def check_stock_horovods_load_model_takes_a_compression() -> None:
    with shared_folder(hvd) as folder:
        path = folder / f"model{hvd.rank()}.keras"
        model = compiled(make_model(), distribute(OkTopk(density=0.1)))
        fit(model, [broadcast()])
        model.save(path)
        loaded = stock_keras.load_model(str(path), compression=OkTopk(density=0.1))
        fit(loaded, [broadcast()])
        assert step_report(loaded).step == 8
        assert_equal_everywhere(hvd, weights(loaded))


def check_load_model_has_the_arguments_of_keras_and_of_horovod() -> None:
    with shared_folder(hvd) as folder:
        path = str(folder / f"model{hvd.rank()}.keras")
        model = compiled(make_model(), distribute(OkTopk(density=0.1)))
        fit(model, [broadcast()])
        model.save(path)
        loaded = hvd_keras.load_model(path, [], None, OkTopk(density=0.1), safe_mode=True)
        fit(loaded, [broadcast()])
        assert step_report(loaded).step == 8
        assert hvd_keras.load_model(path, compile=False).get_weights()
        assert "legacy" in refusal(lambda: hvd_keras.load_model(path, legacy_opts=True))


def check_the_factory_has_horovods_arguments() -> None:
    for compression in (OkTopk(density=0.1), hvd.Compression.none):
        optimizer = hvd_keras.DistributedOptimizer(
            keras.optimizers.SGD(0.1), "name", "", "", compression, gradient_predivide_factor=2.0, num_groups=1)
        model = compiled(make_model(), optimizer)
        fit(model, [broadcast()])
        assert_equal_everywhere(hvd, weights(model))


def check_iterations_count_passes() -> None:
    """Check it, as schedules of the learning rate read them: they are the same in both Kerases, as in stock."""
    model = compiled(make_model(), distribute(DENSE, backward_passes_per_step=4))
    fit(model, [broadcast()])
    assert int(model.optimizer.iterations.numpy()) == 8
    assert step_report(model).step == 2


def check_a_pass_without_a_gradient_counts_as_zero() -> None:
    """Whichever pass it is: in the last one, Horovod's helper would drop what the others have added up."""
    for compression in (DENSE, hvd.Compression.none):
        for missing in range(3):
            optimizer = distribute(compression, keras.optimizers.SGD(1.0), backward_passes_per_step=3)
            variables = [keras.Variable(tf.zeros(4)) if KERAS_3 else tf.Variable(tf.zeros(4)) for _ in range(2)]
            for number in range(3):
                gradient = tf.fill([4], float(10 ** number * (1 + hvd.rank())))
                optimizer.apply_gradients(zip([gradient, None if number == missing else gradient], variables,
                                              strict=True))
            mean = (1 + hvd.size()) / 2
            whole, part = (-np.asarray(variable)[0] / mean for variable in variables)
            np.testing.assert_allclose([whole, part], [111, 111 - 10 ** missing], rtol=1e-6)


def check_each_list_of_variables_has_passes_of_its_own() -> None:
    """Check it, as those of a GAN's two sides come in turn; the second may be traced after the first."""
    for wrap, compression in itertools.product((lambda function: function, tf.function), (
            OkTopk(density=1.0), StepAhead(Dense(), ahead=1), Dense(), hvd.Compression.none)):
        optimizer = distribute(compression, keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        variables = [keras.Variable(tf.zeros(4)) if KERAS_3 else tf.Variable(tf.zeros(4)) for _ in range(2)]
        optimizer.build(variables)
        apply = optimizer.apply_gradients
        one, other = (wrap(partial(apply, [(tf.fill([4], value), variable)]))
                      for value, variable in zip((1.0, 100.0), variables, strict=True))
        for one_pass in (one, other, one, other, one, other, other):  # the fifth is left over
            one_pass()
        with shared_parameters(optimizer) if isinstance(compression, OkTopk | StepAhead) else nullcontext():
            assert [-np.asarray(variable)[0] for variable in variables] == [2.0, 400.0], compression


def check_gradients_of_several_passes_may_have_another_dtype() -> None:
    for dtype in (tf.float16, tf.float64):
        optimizer = distribute(OkTopk(density=1.0), keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        variable = keras.Variable(tf.zeros(4)) if KERAS_3 else tf.Variable(tf.zeros(4))
        for _ in range(2):
            optimizer.apply_gradients([(tf.ones(4, dtype), variable)])
        assert np.array_equal(np.asarray(variable), np.full(4, -2.0))


def check_layers_are_frozen_between_passes() -> None:
    """StepAhead trains the others, whatever was added up for those that are frozen."""
    model = make_model()
    optimizer = distribute(AHEAD, backward_passes_per_step=3)
    fit(compiled(model, optimizer), [broadcast()])
    model.layers[0].trainable = False
    before = [each.numpy() for each in model.layers[-1].trainable_variables]
    fit(compiled(model, optimizer), [broadcast()])
    assert_equal_everywhere(hvd, weights(model))
    after = model.layers[-1].trainable_variables
    assert not any(np.array_equal(one, other.numpy()) for one, other in zip(before, after, strict=True))


def check_sparse_gradients_of_several_passes_are_refused() -> None:
    optimizer = distribute(OkTopk(density=0.1), keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    variable = keras.Variable(tf.zeros((4, 2))) if KERAS_3 else tf.Variable(tf.zeros((4, 2)))
    optimizer.build([variable])
    rows = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([4, 2]))
    assert "give sparse_as_dense=True" in refusal(lambda: optimizer.apply_gradients([(rows, variable)]))


def check_half_of_the_passes_hide_an_exchange() -> None:
    """Then it is applied: the passes after it see what the other ranks have sent."""
    needs_ranks(hvd)
    for wrap, passes in itertools.product((lambda function: function, tf.function), (2, 3, 4)):
        mean, hidden = (1 + hvd.size()) / 2, passes // 2
        assert values_after_passes(wrap, passes, 2 * passes - 1) == [
            *[0.0] * (passes - 1), *[-1.0 - hvd.rank()] * hidden, *[-mean] * (passes - hidden)]


def values_after_passes(wrap: Callable[..., Callable[[], object]], passes: int, count: int) -> list[float]:
    """Return what this rank's variable holds after each pass. Its gradient is one more than the rank."""
    optimizer = distribute(StepAhead(Dense(), ahead=1), keras.optimizers.SGD(1.0), backward_passes_per_step=passes,
                           average_aggregated_gradients=True)
    variable = keras.Variable(tf.zeros(())) if KERAS_3 else tf.Variable(tf.zeros(()))
    optimizer.build([variable])
    one_pass = wrap(lambda: optimizer.apply_gradients([(tf.constant(1.0 + hvd.rank()), variable)]))
    return [(one_pass(), float(variable.numpy()))[1] for _ in range(count)]


def check_a_strategy_of_several_workers_is_refused() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({})))
    with strategy.scope():
        assert "tf.distribute.MultiWorkerMirroredStrategy makes replicas" in refusal(lambda: distribute(DENSE))


def check_ranks_with_different_rates_are_told_once() -> None:
    needs_ranks(hvd)
    scaler = keras.mixed_precision.LossScaleOptimizer
    made = [distribute(compression) for compression in (OkTopk(density=0.1), AHEAD)]
    if KERAS_3:
        made += [scaler(distribute(AHEAD)), distribute(OkTopk(density=0.1), scaler(keras.optimizers.SGD(0.1)))]
    for optimizer in made:
        model = compiled(make_model(), optimizer)
        with logged() as lines:
            fit(model, [broadcast(), keras.callbacks.LearningRateScheduler(
                lambda epoch: 0.1 if not epoch else 0.1 * (1 + hvd.rank()))])
        assert len([line for line in lines if "different learning rates at step 5" in line]) == 1, lines


def check_stock_horovods_optimizer_is_refused_where_it_reduces_nothing() -> None:
    needs(KERAS_3, "Keras 3")
    model = compiled(make_model(), stock_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    assert "reduces nothing under Keras 3" in refusal(lambda: fit(model, [broadcast()]))


def check_dense_trains_by_the_same_program() -> None:
    """One argument switches to dense training, in Horovod's function as in ours: callbacks and calls go on."""
    trained = []
    for factory, compression in ((hvd_keras, DENSE), (hvd_keras, Dense()), (stock_keras, Dense), (hvd, Dense())):
        model = compiled(make_model(), factory.DistributedOptimizer(keras.optimizers.SGD(0.1),
                                                                    compression=compression))
        fit(model, [broadcast(), hvd_keras.callbacks.DensityWarmup(), hvd_keras.callbacks.StepReportLogger()])
        hvd_keras.set_density(model.optimizer, 0.5)
        with hvd_keras.shared_parameters(model):
            trained.append(flat(weights(model)))
        assert (hvd_keras.step_report(model) is None) == (compression is not DENSE)
        assert_equal_everywhere(hvd, weights(model))
    for other in trained[2:]:
        np.testing.assert_array_equal(other, trained[1])
    np.testing.assert_allclose(trained[1], trained[0], rtol=1e-5, atol=1e-6)
    scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    hvd_keras.set_density(hvd_keras.DistributedOptimizer(scaled, compression=Dense()), 0.5)


def check_stock_horovods_callback_is_told_from_this_packages() -> None:
    needs_ranks(hvd)
    needs(KERAS_3, "Keras 3")

    def train() -> None:
        model = compiled(make_model(seed=hvd.rank()), distribute(AHEAD))
        try:
            fit(model, [stock_keras.callbacks.BroadcastGlobalVariablesCallback(0)])
        except Exception as error:
            raise RuntimeError(str(error)) from error

    assert "of horovod_oktopk.tensorflow.keras" in raised_everywhere(hvd, RuntimeError, train)[0]

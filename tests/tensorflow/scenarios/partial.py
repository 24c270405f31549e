"""`Partial` in `model.fit` of Keras 3: replicas are equal when they are evaluated, and what cannot be is refused."""

from __future__ import annotations

import functools
import time

import horovod.tensorflow as hvd
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import AgreementError, Dense, OkTopk, Partial
from horovod_oktopk.tensorflow import step_report, synchronize_replicas
from tests.scenarios.common import assert_equal_everywhere, everywhere, needs_ranks, raised_everywhere
from tests.tensorflow.scenarios.common import (
    broadcast,
    compiled,
    distribute,
    fit,
    keras,
    make_model,
    refusal,
    weights,
)

EPOCHS = 4


class Uneven(keras.callbacks.Callback):
    """Every rank is late in turn."""

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        time.sleep(0.01 * (batch % hvd.size() == hvd.rank()))


class EqualAtEvaluation(keras.callbacks.Callback):
    """Comes after the broadcast callback."""

    seen = 0

    def on_test_begin(self, logs: object = None) -> None:
        assert_equal_everywhere(hvd, weights(self.model))
        self.seen += 1


def check_fit_with_validation_and_callbacks() -> None:
    for options in (Partial(OkTopk(density=0.1), policy="solo"), Partial(Dense(), policy="majority"),
                    Partial(Dense(), policy="solo", in_order=False)):
        model = compiled(make_model(), distribute(options, keras.optimizers.Adam(0.02)))
        evaluation = EqualAtEvaluation()
        callbacks = hvd_keras.callbacks
        history = fit(model, [callbacks.BroadcastGlobalVariablesCallback(0), Uneven(), callbacks.StepReportLogger(),
                              callbacks.MetricAverageCallback(), evaluation],
                      epochs=EPOCHS, validation_split=0.5)
        assert evaluation.seen == EPOCHS
        assert_equal_everywhere(hvd, weights(model))
        assert history["loss"][-1] < history["loss"][0]
        assert 0 < sum(history["oktopk_rounds"]) <= EPOCHS * hvd.size()
        assert all(0 <= value <= hvd.size() for value in history["oktopk_active_ranks"])
        assert {"oktopk_staleness", "oktopk_seconds_saved"} <= set(history)


def check_a_validation_of_some_ranks_is_told_to_all() -> None:
    needs_ranks(hvd)
    model = compiled(make_model(), distribute(Partial(Dense(), policy="solo")))
    split = 0.5 if hvd.rank() == 0 else 0.0
    message = raised_everywhere(hvd, AgreementError, lambda: fit(
        model, [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)], epochs=1, validation_split=split))[0]
    assert "rank 0: validation; rank 1: the end of an epoch" in message


def check_a_learning_rate_schedule_follows_the_updates() -> None:
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.7)
    optimizer = distribute(Partial(Dense(), policy="solo"), keras.optimizers.SGD(rate, momentum=0.9))
    model = compiled(make_model(), optimizer)
    fit(model, [Uneven()])
    synchronize_replicas(model)
    assert_equal_everywhere(hvd, weights(model))
    assert len(set(everywhere(hvd, int(model.optimizer.iterations.numpy())))) == 1


def check_what_partial_cannot_do_is_refused() -> None:
    scaling = keras.mixed_precision.LossScaleOptimizer
    model = make_model()
    assert "LossScaleOptimizer" in refusal(lambda: distribute(Partial(), scaling(keras.optimizers.SGD(0.1))))
    assert "backward_passes_per_step=1" in refusal(lambda: distribute(Partial(), backward_passes_per_step=2))
    optimizer = distribute(Partial(Dense()))
    assert "local variable" in refusal(lambda: optimizer.register_local_var(model.trainable_variables[0]))
    outer = scaling(optimizer)
    outer.build(model.trainable_variables)
    zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
    assert "LossScaleOptimizer" in refusal(lambda: outer.apply(zeros, model.trainable_variables))
    slices = tf.IndexedSlices(tf.zeros((1, *model.trainable_variables[0].shape[1:])), tf.constant([0]))
    assert "sparse_as_dense=True" in refusal(
        lambda: optimizer.apply([slices, *zeros[1:]], model.trainable_variables))
    optimizer.apply(zeros, model.trainable_variables)
    assert "no gradient" in refusal(lambda: optimizer.apply([None, *zeros[1:]], model.trainable_variables))
    synchronize_replicas(optimizer)


def check_eager_steps_and_a_report() -> None:
    model = compiled(make_model(), distribute(Partial(OkTopk(density=0.2), policy="majority")), run_eagerly=True)
    fit(model, [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), Uneven()])
    assert_equal_everywhere(hvd, weights(model))
    report = step_report(model)
    assert report.rounds == 0 or len(report.active) == hvd.size()
    assert "write_back" in report.phases


def check_momentum_is_corrected_at_no_batch_of_a_rank() -> None:
    """Check it: rounds come at other batches on each rank, and replicas would differ."""
    make = functools.partial(hvd_keras.callbacks.LearningRateWarmupCallback, 0.1, warmup_epochs=1)
    for optimizer, correction in ((keras.optimizers.SGD(0.1, momentum=0.9), True), (keras.optimizers.SGD(0.1), True),
                                  (keras.optimizers.SGD(0.1, momentum=0.9), False)):
        model = compiled(make_model(), distribute(Partial(OkTopk(density=0.1)), optimizer))
        train = functools.partial(fit, model, [broadcast(), make(momentum_correction=correction)])
        if correction and optimizer.momentum:
            assert "give momentum_correction=False" in refusal(train)
        else:
            train()

"""model.fit under both Keras: it reduces, whatever way the step is run, and the callbacks do what they say."""

from __future__ import annotations

import csv
import functools

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_oktopk.tensorflow.keras as hvd_keras
from horovod_oktopk import AgreementError, PluginError
from horovod_oktopk.tensorflow import OkTopk, StepAhead, step_report
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
    weights,
)


def train(compression: object, passes: int = 1, **arguments: object) -> np.ndarray:
    model = compiled(make_model(), distribute(compression, backward_passes_per_step=passes), **arguments)
    history = fit(model)
    assert history["loss"][1] < history["loss"][0]
    assert_equal_everywhere(hvd, weights(model))
    if compression is DENSE:
        assert step_report(model).step == 8 / passes
    return flat(weights(model))


def check_fit_reduces_as_a_dense_allreduce_does() -> None:
    for ways, of_both in (([{}, {"run_eagerly": True}, {"steps_per_execution": 2}], {}), ([{}], {"passes": 2})):
        dense = train(hvd.Compression.none, **of_both)
        for way in ways:
            np.testing.assert_allclose(train(DENSE, **way, **of_both), dense, rtol=1e-4, atol=1e-6)


def check_the_callback_switches_xla_off() -> None:
    for optimizer in (distribute(DENSE), keras.mixed_precision.LossScaleOptimizer(distribute(DENSE))):
        model = compiled(make_model(), optimizer, jit_compile="auto" if KERAS_3 else True)
        fit(model, [broadcast()])
        assert not model.jit_compile
        assert step_report(model).step == 8


def check_the_callback_warns_of_a_plain_optimizer() -> None:
    with logged() as messages:
        fit(compiled(make_model(), keras.optimizers.SGD(0.1)), [broadcast()], epochs=1)
    assert any("is not distributed" in message for message in messages)


def check_sparse_fit_learns_and_replicas_are_equal() -> None:
    model = compiled(make_model(), distribute(OkTopk(density=0.05), keras.optimizers.Adam(0.02)))
    history = fit(model, epochs=8)
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert_equal_everywhere(hvd, weights(model))
    assert step_report(model).step == 8 * 4
    assert step_report(model) is step_report(model.optimizer)


def check_ranks_start_from_the_weights_of_rank_0() -> None:
    for compression in (DENSE, StepAhead(OkTopk(density=0.05))):
        model = compiled(make_model(seed=1 + hvd.rank()), distribute(compression))
        seen: list[np.ndarray] = []
        spy = keras.callbacks.LambdaCallback(
            on_batch_begin=lambda batch, logs, of=model, seen=seen: seen.append(weights(of)["000"]))
        fit(model, [broadcast(), spy])
        assert_equal_everywhere(hvd, weights(model))
        assert_equal_everywhere(hvd, {"before the first step": seen[0]})
        assert step_report(model).step == 8


def check_random_seeds_are_not_broadcast() -> None:
    needs(KERAS_3, "Keras 3")
    keras.utils.set_random_seed(5 + hvd.rank())
    model = compiled(keras.Sequential([keras.layers.Input((20,)), keras.layers.Dropout(0.5), keras.layers.Dense(4)]),
                     distribute(DENSE))
    fit(model, [broadcast()])
    assert_equal_everywhere(hvd, weights(model))
    seeds = everywhere(hvd, model.layers[0].seed_generator.state.numpy().tobytes())
    assert len(set(seeds)) == hvd.size()


def check_callbacks_put_the_report_into_the_logs() -> None:
    with shared_folder(hvd) as folder:
        model = compiled(make_model(), distribute(OkTopk(density=0.1)))
        table = folder / f"log{hvd.rank()}.csv"
        seen: list[dict[str, float]] = []
        spy = keras.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: seen.append(dict(logs)))
        history = fit(model, [hvd_keras.callbacks.StepReportLogger(), hvd_keras.callbacks.MetricAverageCallback(),
                              keras.callbacks.CSVLogger(str(table)), spy])
        with table.open() as file:
            rows = list(csv.DictReader(file))
    report = step_report(model)
    for key in ("k", "local_selected", "global_selected", "local_threshold", "global_threshold", "bytes_sent"):
        assert len(history[f"oktopk_{key}"]) == 2
        assert f"oktopk_{key}" in rows[1]
    assert history["oktopk_k"] == [report.k, report.k]
    np.testing.assert_allclose(history["oktopk_density"], report.k / report.n, rtol=1e-6)
    assert len(seen) == 8
    assert seen[-1]["oktopk_bytes_sent"] == report.bytes_sent
    mine = np.mean([logs["oktopk_bytes_sent"] for logs in seen[4:]])
    np.testing.assert_allclose(history["oktopk_bytes_sent"][1], np.mean(everywhere(hvd, mine)), rtol=1e-6)


def check_a_model_whose_gradients_are_all_sparse_is_reported() -> None:
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(20, 4),
                              keras.layers.GlobalAveragePooling1D()])
    compiled(model, distribute(OkTopk(density=0.1)))
    x = np.arange(48, dtype=np.int32).reshape(16, 3) % 20
    history = model.fit(x, np.zeros(16, np.int32), batch_size=8, verbose=0,
                        callbacks=[hvd_keras.callbacks.StepReportLogger()]).history
    assert step_report(model).n == 0
    assert history["oktopk_density"] == [0.0]


def check_ranks_with_fewer_batches_are_an_error_on_all() -> None:
    needs_ranks(hvd)
    callbacks = hvd_keras.callbacks
    for compression in (OkTopk(density=0.1), StepAhead(OkTopk(density=0.1))):
        for communicates in (callbacks.BroadcastGlobalVariablesCallback(0), callbacks.MetricAverageCallback()):
            model = compiled(make_model(), distribute(compression))
            x, y = make_data(32 if is_last(hvd) else 64)
            messages = raised_everywhere(hvd, AgreementError, functools.partial(
                model.fit, x, y, batch_size=16, epochs=2, verbose=0, callbacks=[communicates]))
            assert all("take a step" in each and "of an epoch" in each for each in messages), messages


def check_metrics_of_other_names_are_an_error_on_all() -> None:
    needs_ranks(hvd)
    model = make_model()
    model.compile(distribute(OkTopk(density=0.1)), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  metrics=[keras.metrics.SparseCategoricalAccuracy(f"accuracy{int(is_last(hvd))}")])
    messages = raised_everywhere(hvd, AgreementError, lambda: fit(model, [
        hvd_keras.callbacks.MetricAverageCallback()]))
    assert all("different metrics (rank 0: accuracy0, loss" in each for each in messages), messages


def check_adafactor_is_refused_where_sparse_updates_would_make_it_nan() -> None:
    message = raised_everywhere(hvd, PluginError,
                                lambda: distribute(OkTopk(density=0.01), keras.optimizers.Adafactor(0.01)))[0]
    assert "epsilon_1=1e-12" in message
    adafactor = keras.optimizers.Adafactor(0.01, epsilon_1=1e-12)
    model = compiled(make_model(), distribute(OkTopk(density=0.01), adafactor))
    fit(model)
    assert all(np.isfinite(value).all() for value in weights(model).values())
    distribute(DENSE, keras.optimizers.Adafactor(0.01))


def check_metrics_are_averaged() -> None:
    """Vectors, too, and what a model's own step has put into groups, which Keras 3 takes apart."""
    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
            logs["rank"] = float(hvd.rank())
            logs["by_class"] = tf.constant([[1.0, 2.0], [3.0, 4.0]]) * (1.0 + hvd.rank())
            logs["parts"] = {"a": float(hvd.rank()), "b": 1.0}

    history = fit(compiled(make_model(), distribute(DENSE)), [Own(), hvd_keras.callbacks.MetricAverageCallback()])
    np.testing.assert_allclose(history["rank"], (hvd.size() - 1) / 2)
    assert history["parts"][0] == {"a": (hvd.size() - 1) / 2, "b": 1.0}
    np.testing.assert_allclose(history["by_class"][0], np.array([[1.0, 2.0], [3.0, 4.0]]) * (1 + hvd.size()) / 2)
    assert len(set(everywhere(hvd, tuple(map(float, history["loss"]))))) == 1


def check_local_layers_and_variables_keep_their_own_gradients() -> None:
    model = make_model()
    optimizer = distribute(DENSE)
    optimizer.register_local_var(model.trainable_variables[-1])
    cases = [(compiled(model, optimizer), 20 * 24 + 24 + 24 * 4)]
    if not KERAS_3:
        import horovod.keras
        model = make_model()
        optimizer = horovod.keras.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), compression=DENSE,
                                                              local_layers=model.layers[-1])
        cases.append((compiled(model, optimizer), 20 * 24 + 24))
    for model, reduced in cases:
        fit(model)
        assert_equal_everywhere(hvd, {"kernel": weights(model)["000"]})
        assert len(set(everywhere(hvd, weights(model)["003"].tobytes()))) == hvd.size()
        assert step_report(model).n == reduced

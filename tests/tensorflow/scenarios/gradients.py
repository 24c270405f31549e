"""Gradients that are sparse, missing, local, or of other variables than before."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from horovod_oktopk.tensorflow import Dense, OkTopk, set_density, step_report
from horovod_oktopk.tensorflow.registry import each_run_of
from tests.scenarios.common import (
    DENSE,
    assert_disagreement,
    assert_equal_everywhere,
    everywhere,
    gradients,
    is_last,
    logged,
    needs_ranks,
    raised_everywhere,
)
from tests.tensorflow.driver import Kind
from tests.tensorflow.scenarios.common import EAGER_AND_GRAPH, reduced, refusal


def pair() -> list[tf.Variable]:
    return [tf.Variable(tf.ones(3), name="first"), tf.Variable(tf.ones(2), name="second")]


def reduced_sums(variables: list[tf.Variable], trained: list[tf.Variable] | None = None) -> list[Any]:
    """Reduce gradients of ones; trained: the variables that have one, if not all."""
    return reduced(variables, lambda: tf.add_n(list(map(tf.reduce_sum, trained or variables))))


def train_a_table(way: Any, as_dense: bool, compression: Any) -> np.ndarray:
    table, weight = tf.Variable(tf.ones((20, 3)), name="table"), tf.Variable(tf.ones((3, 1)), name="weight")

    def step(rows: tf.Tensor) -> None:
        grads = reduced([table, weight], lambda: tf.reduce_sum(tf.gather(table, rows) @ weight), compression,
                        sparse_as_dense=as_dense)
        assert isinstance(grads[0], tf.IndexedSlices) != as_dense
        table.assign_sub(0.5 * tf.convert_to_tensor(grads[0]))
        weight.assign_sub(0.5 * grads[1])

    run = way(step)
    for index in range(3):
        run(tf.constant([index, index + hvd.rank() + 1]))
    if compression is DENSE:
        assert step_report([table, weight]).n == (63 if as_dense else 3)
    trained = np.concatenate([np.ravel(table.numpy()), np.ravel(weight.numpy())])
    assert_equal_everywhere(hvd, {"all": trained})
    return trained


def check_sparse_gradients() -> None:
    for way, as_dense in itertools.product(EAGER_AND_GRAPH, (False, True)):
        stock, ours = (train_a_table(way, as_dense, compression) for compression in (hvd.Compression.none, DENSE))
        np.testing.assert_allclose(ours, stock, rtol=1e-5)


def check_dense_tapes_reduce_the_variables_of_keras() -> None:
    """One argument switches to dense training, for tapes as for optimizers, under both Kerases."""
    for way, compression in itertools.product(EAGER_AND_GRAPH, (Dense(), Dense, DENSE)):
        table, layer = tf.keras.layers.Embedding(5, 2), tf.keras.layers.Dense(1, kernel_initializer="ones")
        model = tf.keras.Sequential([tf.keras.Input((1,), dtype="int32"), table, layer])
        table.set_weights([np.ones((5, 2))])

        def step(rows: tf.Tensor, model: Any = model, compression: Any = compression) -> Any:
            return reduced(model.trainable_variables, lambda: tf.reduce_sum(model(rows)), compression, op=hvd.Average)

        sparse, kernel, bias = way(step)(tf.constant([[hvd.rank() % 5]]))
        rows = np.bincount([rank % 5 for rank in range(hvd.size())], minlength=5) / hvd.size()
        np.testing.assert_allclose(tf.convert_to_tensor(sparse), np.stack([rows, rows], 1), rtol=1e-6)
        assert np.ravel(kernel).tolist() == [1.0, 1.0]
        assert float(bias[0]) == 1.0


def check_dense_tapes_keep_horovods_checks_and_groups() -> None:
    layer = tf.keras.layers.Dense(2, kernel_initializer="ones")
    layer.build((None, 3))
    kernel, bias = layer.trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.ones((1, 3)))) * (hvd.rank() + 1.0)
    for wrong in ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, {"groups": -1}):
        with pytest.raises(ValueError, match="gradient_predivide_factor|groups should be"):
            hvd.DistributedGradientTape(tape, compression=Dense(), **wrong)
    tape = hvd.DistributedGradientTape(tape, compression=Dense(), op=hvd.Sum, groups=[[kernel, bias]])
    for gradient in tape.gradient(loss, [kernel, bias]):
        assert {*np.ravel(gradient).tolist()} == {sum(range(1, hvd.size() + 1))}


def check_nan_in_a_sparse_gradient_alone_undoes_the_step() -> None:
    """NaN skips the step whole: what the dense gradients would have sent must stay in the residual."""
    for way in EAGER_AND_GRAPH:
        options = OkTopk(density=0.5)
        table = tf.Variable(tf.ones((20, 3)), name="table")
        dense = [tf.Variable(tf.ones(4), name=name) for name in "ab"]

        def step(factor: tf.Tensor, table: Any = table, dense: Any = dense, options: Any = options) -> Any:
            def loss() -> tf.Tensor:
                return factor * tf.reduce_sum(tf.gather(table, [1, 2])) + tf.add_n(
                    [tf.reduce_sum(each * [1.0, 2.0, 3.0, 4.0]) for each in dense])
            return reduced([table, *dense], loss, options)

        run = way(step)
        run(tf.constant(1.0))
        flat = each_run_of(dense)[0].mode
        held = flat.read_residual()
        assert held.any()
        for poison in (np.inf, np.nan):
            _, *grads = run(tf.constant(poison if is_last(hvd) else 1.0))
            assert all(np.isnan(gradient.numpy()).all() for gradient in grads)
            assert np.array_equal(flat.read_residual(), held)
            assert not step_report(dense).finite
        run(tf.constant(1.0))
        assert step_report(dense).finite
        assert step_report(dense).step == 2


def check_a_gradient_that_is_none_everywhere_stays_none() -> None:
    first, second = pair()
    for _ in range(2):
        grads = reduced([first, second], lambda: tf.reduce_sum(first) * 2.0)
        assert grads[1] is None
        assert grads[0].numpy().tolist() == [2.0 * hvd.size()] * 3


def check_gradients_have_the_structure_of_the_sources() -> None:
    first, second = pair()
    third = tf.Variable(tf.ones(2), name="third")
    for sources in ([first, second, third], [[first, second], [third]], {"a": first, "b": [second, third]}):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(first) + tf.reduce_sum(second) + tf.reduce_sum(third)
        grads = hvd.DistributedGradientTape(tape, compression=DENSE, op=hvd.Sum).gradient(loss, sources)
        tf.nest.assert_same_structure(grads, sources)
        assert all((g.numpy() == hvd.size()).all() for g in tf.nest.flatten(grads))


def check_a_gradient_that_is_none_on_one_rank() -> None:
    needs_ranks(hvd)
    for way in EAGER_AND_GRAPH:
        for later in (False, True):
            both = pair()
            if later:
                reduced_sums(both)
            step = functools.partial(reduced_sums, both, both[:1] if is_last(hvd) else both)
            assert_disagreement(hvd, way(step), "second:0: no gradient", "second:0: shape")


def check_gradients_that_come_or_go_later() -> None:
    for way in EAGER_AND_GRAPH:
        both = pair()
        more = [*both, tf.Variable(tf.ones(4), name="third")]
        reduced_sums(both)
        for variables, trained, told in ((both, both[:1], "second:0"), (more, more, "third:0")):
            assert told in refusal(way(functools.partial(reduced_sums, variables, trained)))
        if hvd.size() > 1:  # added on one rank only: the others learn it, and nobody waits
            assert_disagreement(hvd, way(functools.partial(reduced_sums, more if is_last(hvd) else both)))


def check_an_error_in_a_graph_is_a_line_of_the_log_by_itself() -> None:
    first, second = tf.Variable(tf.ones(3)), tf.Variable(tf.ones(2), name="told_once")
    reduced_sums([first])
    step = tf.function(lambda: reduced_sums([first, second]))
    with logged() as messages:
        for _ in range(2):
            refusal(step)
    [line] = messages
    assert line.startswith("PluginError: the gradients differ from those of the first step")
    assert "told_once" in line


def check_tapes_over_other_variables_have_residuals_of_their_own() -> None:
    options = OkTopk(density=0.1)
    first, second = pair()
    for _ in range(2):
        reduced([first], lambda: tf.reduce_sum(first * [1.0, 2.0, 3.0]), options)
        reduced([second], lambda: tf.reduce_sum(second * [5.0, 4.0]), options)
    assert step_report([first]).n == 3
    assert step_report([second]).n == 2
    assert step_report([second]).step == 2


def check_a_tape_with_another_density_keeps_the_residual() -> None:
    for way in EAGER_AND_GRAPH:
        first, _ = pair()

        def step(density: float, variable: Any = first) -> Any:
            return reduced([variable], lambda: tf.reduce_sum(variable * [1.0, 2.0, 4.0]), OkTopk(density=density))[0]

        run = way(step)
        run(0.33)
        assert run(0.67).numpy().tolist() == [0.0, 4.0 * hvd.size(), 4.0 * hvd.size()]
        assert run(0.33).numpy().tolist() == [0.0, 0.0, 4.0 * hvd.size()]  # traced before
        assert [step_report([first]).step, step_report([first]).k] == [3, 1]
        set_density([first], 1.0)  # which holds while the tape's own is the same
        assert run(0.33).numpy().tolist() == [4.0 * hvd.size(), 4.0 * hvd.size(), 4.0 * hvd.size()]


def check_tapes_whose_densities_have_the_same_ratio_share_a_residual() -> None:
    first, _ = pair()

    def step(density: float) -> Any:
        options = OkTopk(density=density, global_density=density / 2)
        return reduced([first], lambda: tf.reduce_sum(first * [1.0, 2.0, 4.0]), options)[0]

    step(0.33)
    assert step(0.67).numpy().tolist() == [0.0, 4.0 * hvd.size(), 0.0]  # 2 + 2; a tie goes to the lower index
    report = step_report([first])
    assert (report.step, report.k, report.global_k) == (2, 2, 1)


def check_heads_that_take_turns() -> None:
    """Users do what the error advises: what every step trains in one call, and a head in another."""
    trunk, first, second = (tf.Variable(tf.ones(3), name=name) for name in ("trunk", "first", "second"))

    def step(head: tf.Variable, together: bool) -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(trunk * head)
        tape = hvd.DistributedGradientTape(tape, compression=DENSE, op=hvd.Sum)
        return tape.gradient(loss, [trunk, head]) if together else [*tape.gradient(loss, [trunk]),
                                                                    *tape.gradient(loss, [head])]

    for head in (first, second, first):
        assert [g.numpy().tolist() for g in step(head, together=False)] == [[float(hvd.size())] * 3] * 2
    assert "persistent tape" in refusal(lambda: step(first, together=True))


def check_no_trainable_variable() -> None:
    for way in EAGER_AND_GRAPH:
        assert way(functools.partial(reduced, [], lambda: tf.constant(1.0), op=hvd.Average))() == []


def check_no_trainable_variable_on_one_rank() -> None:
    needs_ranks(hvd)
    first, _ = pair()
    chosen = [] if is_last(hvd) else [first]
    assert_disagreement(hvd, lambda: reduced(chosen, lambda: tf.reduce_sum(first)), "first:0")


def check_a_tensor_is_refused_as_a_source() -> None:
    x = tf.constant([1.0, 2.0])
    assert "tf.Variables" in refusal(lambda: reduced([x], lambda: tf.reduce_sum(x * x)))


def check_a_variable_of_unknown_shape_is_refused() -> None:
    x = tf.Variable(tf.ones((2, 3)), shape=tf.TensorShape([None, 3]))
    assert "shape must be known" in refusal(lambda: reduced([x], lambda: tf.reduce_sum(x * x)))


def check_the_users_own_tape_gives_this_ranks_own_gradients() -> None:
    x = tf.Variable([1.0, 2.0])
    for compression in (DENSE, Dense()):
        for tape in (tf.GradientTape(persistent=True), tf.GradientTape()):
            with tape:
                loss = (1.0 + hvd.rank()) * tf.reduce_sum(x)
                of_all = hvd.DistributedGradientTape(tape, compression=compression)
            if tape._persistent:
                assert tape.gradient(loss, x).numpy().tolist() == [1.0 + hvd.rank()] * 2
            mean = (1.0 + hvd.size()) / 2
            assert of_all.gradient(loss, [x])[0].numpy().tolist() == [mean] * 2
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=compression) as recording:
            loss = (1.0 + hvd.rank()) * tf.reduce_sum(x)
        assert recording.gradient(loss, [x])[0].numpy().tolist() == [mean] * 2
        assert "takes no jacobian" in refusal(functools.partial(recording.jacobian, loss, x))


def check_reduced_gradients_refuse_a_second_derivative() -> None:
    """Without a word it would be None, or be left out of a sum."""
    x = tf.Variable([1.0, 2.0])

    def differentiate() -> Any:
        with tf.GradientTape() as outer:
            (gradient,) = reduced([x], lambda: tf.reduce_sum(x ** 3))
            penalty = tf.reduce_sum(gradient ** 2) + tf.reduce_sum(x)
        return outer.gradient(penalty, x)

    for way in EAGER_AND_GRAPH:  # TensorFlow's own error differs
        message = raised_everywhere(hvd, Exception, way(differentiate))[0]
        assert "take the inner gradient from a plain tf.GradientTape" in message


def check_dense_and_local_gradients_have_second_derivatives() -> None:
    """Horovod's allreduce has a derivative, and so has what is not reduced."""
    x = tf.Variable([1.0, 2.0])
    for way, compression in itertools.product(EAGER_AND_GRAPH, (Dense(), DENSE)):
        def differentiate(compression: Any = compression) -> Any:
            with tf.GradientTape() as outer:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(x ** 3)
                tape = hvd.DistributedGradientTape(tape, compression=compression, scale_local_gradients=False)
                if compression is DENSE:
                    tape.register_local_source(x)
                (gradient,) = tape.gradient(loss, [x])
                penalty = tf.reduce_sum(gradient ** 2)
            return outer.gradient(penalty, x)

        assert way(differentiate)().numpy().tolist() == [36.0, 288.0]


def check_local_sources_of_a_tape() -> None:
    first, second = pair()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(first) * (hvd.rank() + 1.0) + tf.reduce_sum(second) * (hvd.rank() + 1.0)
    tape = hvd.DistributedGradientTape(tape, compression=DENSE, op=hvd.Sum, scale_local_gradients=False)
    tape.register_local_source(second)
    shared, local = tape.gradient(loss, [first, second])
    assert shared.numpy().tolist() == [sum(range(1, hvd.size() + 1))] * 3
    assert local.numpy().tolist() == [hvd.rank() + 1.0] * 2


def check_partial_tape_leaves_local_layers_alone() -> None:
    layers = [tf.keras.layers.Dense(2, use_bias=False), tf.keras.layers.Dense(1, use_bias=False)]
    model = tf.keras.Sequential([tf.keras.layers.Input((3,)), *layers])
    for layer in layers:
        layer.set_weights([np.ones_like(layer.get_weights()[0])])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones((1, 3)))) * (hvd.rank() + 1.0)
    tape = hvd.PartialDistributedGradientTape(tape, compression=DENSE, op=hvd.Sum, local_layers=layers[1])
    shared, local = tape.gradient(loss, model.trainable_variables)
    assert everywhere(hvd, float(shared[0, 0])) == [sum(range(1, hvd.size() + 1))] * hvd.size()
    assert float(local[0, 0]) == 3.0 * (hvd.rank() + 1) / hvd.size()


def check_gradients_that_somebody_holds_are_not_overwritten() -> None:
    for way in EAGER_AND_GRAPH:
        first, _ = pair()

        def step(factor: tf.Tensor, variable: Any = first) -> Any:
            return reduced([variable], lambda: tf.reduce_sum(variable * factor))[0]

        run = way(step)
        held = [run(tf.constant(float(factor))) for factor in range(1, 6)]
        arrays = [np.asarray(gradient) for gradient in held]
        del held
        run(tf.constant(99.0))
        assert [array.tolist() for array in arrays] == [[factor * float(hvd.size())] * 3 for factor in range(1, 6)]


def check_memory_that_nobody_holds_is_used_again() -> None:
    variable = tf.Variable(tf.ones(1000), name="variable")

    @tf.function
    def step() -> None:
        variable.assign_sub(0.1 * reduced([variable], lambda: tf.reduce_sum(variable))[0])

    step()
    accumulator = each_run_of([variable])[0].mode.reduction.accumulator
    memory = {accumulator.residual.base.ctypes.data, accumulator._acc.base.ctypes.data}
    for _ in range(5):
        step()
    assert {accumulator.residual.base.ctypes.data, accumulator._acc.base.ctypes.data} == memory


def check_the_profiler_shows_the_phases_of_a_step() -> None:
    trainer = Kind("tape")(OkTopk())
    trainer.step(gradients(0, hvd.rank()))
    with TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            trainer.step(gradients(1, hvd.rank()))
        (written,) = Path(folder).rglob("*.xplane.pb")
        shown = written.read_bytes()
    report = trainer.report()
    assert report is not None
    assert len(report.phases) > 4
    assert all(f"oktopk/{phase}".encode() in shown for phase in report.phases)

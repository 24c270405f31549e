"""`StepAhead` where each host is one worker: Horovod averages gradients over its ranks, which take the same steps."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_oktopk import AgreementError, OkTopk, StepAhead
from horovod_oktopk.tensorflow import shared_parameters, step_report
from tests.scenarios.common import everywhere, is_last, needs_ranks, raised_everywhere
from tests.scenarios.hosts import host_sizes, set_of
from tests.tensorflow.scenarios.common import compiled, distribute, keras, make_model
from tests.tensorflow.scenarios.step_ahead import Scaler, assert_shared_is_equal, own, shared

STEPS = 6


def options(length: int, **others: Any) -> StepAhead:
    return StepAhead(OkTopk(density=0.05, value_dtype=None, hierarchical=length), **others)


def batch(step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng((step, rank)).standard_normal((8, 20)).astype(np.float32)
    return x, x[:, :4].argmax(1)


def model_with(compression: Any, **arguments: Any) -> Any:
    return compiled(make_model(1), distribute(compression, keras.optimizers.SGD(0.1, momentum=0.9), **arguments))


def train(model: Any, steps: range, rank: int | None = None) -> None:
    for step in steps:
        model.train_on_batch(*batch(step, hvd.rank() if rank is None else rank))


def one_rank_a_host(length: int, overlap: bool) -> np.ndarray:
    """w of a run among the first ranks of all hosts, each with the batches of its host; there alone."""
    firsts = list(range(0, hvd.size(), length))
    only = set_of(hvd, tuple(firsts))
    plain = StepAhead(OkTopk(density=0.05, value_dtype=None), overlap=overlap)
    model = model_with(plain, process_set=only)
    if hvd.rank() not in firsts:
        return np.empty(0)
    for step in range(STEPS):
        batches = [batch(step, rank) for rank in range(hvd.rank(), hvd.rank() + length)]
        model.train_on_batch(*map(np.concatenate, zip(*batches, strict=True)))
    return shared(model)


def check_trains_as_one_rank_a_host_with_its_batches() -> None:
    """To rounding: the mean over one large batch, and the mean of means."""
    needs_ranks(hvd)
    for length in host_sizes(hvd.size()):
        for overlap in (True, False):
            model = model_with(options(length, overlap=overlap))
            train(model, range(STEPS))
            assert_shared_is_equal(model)
            expected = one_rank_a_host(length, overlap)
            is_near = hvd.rank() % length or np.allclose(shared(model), expected, rtol=0, atol=1e-4)
            assert all(everywhere(hvd, bool(is_near))), (length, overlap)


def check_the_ranks_of_a_host_are_alike() -> None:
    needs_ranks(hvd)
    model = model_with(StepAhead(OkTopk(density=0.05, hierarchical=hvd.size())))
    x, y = batch(0, hvd.rank())
    model.fit(np.tile(x, (4, 1)), np.tile(y, 4), batch_size=8, epochs=2, verbose=0)
    assert len(set(hvd.allgather_object(own(model).tobytes()))) == 1
    assert_shared_is_equal(model)
    assert step_report(model).payload_bytes()[0] == 0, "nothing leaves the host"


def check_one_rank_alone_evaluates() -> None:
    needs_ranks(hvd)
    model = model_with(options(hvd.size()))
    for step in range(4):
        train(model, range(step, step + 1))
        if is_last(hvd):
            with shared_parameters(model):
                assert np.isfinite(own(model)).all()
    assert_shared_is_equal(model)


def check_loss_scaling_skips_on_all_ranks_of_a_host() -> None:
    needs_ranks(hvd)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model = compiled(make_model(1), Scaler(distribute(options(hvd.size()), optimizer)))
    train(model, range(2))
    x, y = batch(2, hvd.rank())
    model.train_on_batch(x * np.float32("inf") if is_last(hvd) else x, y)
    train(model, range(3, 6))
    assert np.isfinite(shared(model)).all()
    assert_shared_is_equal(model)
    assert len(set(hvd.allgather_object(own(model).tobytes()))) == 1


def check_ranks_that_drift_apart_are_told() -> None:
    needs_ranks(hvd)
    model = model_with(options(hvd.size(), overlap=False))
    train(model, range(3))

    def drift() -> None:
        if is_last(hvd):
            for variable in model.trainable_variables:
                variable.assign(tf.convert_to_tensor(variable) + 0.5)
        train(model, range(3, 4))

    messages = raised_everywhere(hvd, AgreementError, drift)
    assert all("which all ranks of a host must change alike" in message for message in messages)

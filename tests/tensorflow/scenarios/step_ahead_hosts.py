"""`StepAhead` where each host is one worker: Horovod averages gradients over its ranks, which take the same steps."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np

from horovod_oktopk import OkTopk, StepAhead
from horovod_oktopk.tensorflow import step_report
from tests.scenarios.common import is_last, needs_ranks
from tests.tensorflow.scenarios.common import compiled, distribute, keras, make_model
from tests.tensorflow.scenarios.step_ahead import Scaler, assert_shared_is_equal, own, shared


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


def check_the_ranks_of_a_host_are_alike() -> None:
    needs_ranks(hvd)
    model = model_with(StepAhead(OkTopk(density=0.05, hierarchical=hvd.size())))
    x, y = batch(0, hvd.rank())
    model.fit(np.tile(x, (4, 1)), np.tile(y, 4), batch_size=8, epochs=2, verbose=0)
    assert len(set(hvd.allgather_object(own(model).tobytes()))) == 1
    assert_shared_is_equal(model)
    assert step_report(model).payload_bytes()[0] == 0, "nothing leaves the host"


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

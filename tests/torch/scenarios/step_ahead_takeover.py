"""Another optimizer over parameters that StepAhead trains; and a program that changes what all ranks share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from horovod_oktopk import PluginError
from horovod_oktopk.torch import OkTopk, StepAhead, shared_parameters
from tests.torch.scenarios.common import assert_equal_everywhere, distribute, flat, raised_everywhere
from tests.torch.scenarios.step_ahead import (
    OPTIONS,
    assert_shared_is_equal,
    distributed,
    model_of,
    shared_of,
    train,
    trained,
)


def check_an_optimizer_that_is_distributed_already_is_refused() -> None:
    model = model_of()
    for compression in (OPTIONS, OkTopk()):
        optimizer = distributed(model, compression)
        for again in (compression, hvd.Compression.none):
            messages = raised_everywhere(PluginError, lambda made=(again, optimizer): distribute(model, *made))
            assert "distributed already" in messages[0]


def check_the_next_optimizer_begins_with_what_all_ranks_share() -> None:
    for inside in (False, True):
        for compression in (OPTIONS, OkTopk(density=0.1), hvd.Compression.none):
            model, optimizer = trained(4)
            with shared_parameters(optimizer) if inside else nullcontext():
                optimizer = distributed(model, compression)  # the one before is gone
            assert_equal_everywhere(model.parameters())
            train(model, optimizer, range(4, 8))
            assert_shared_is_equal(model, optimizer)


def check_two_optimizers_of_the_same_parameters_take_turns() -> None:
    model = model_of()
    optimizers = [distributed(model), distributed(model, StepAhead(OkTopk(density=0.2)), torch.optim.Adam)]
    for step in range(0, 12, 2):
        before = flat(shared_of(model, optimizers[0]))
        turn: Any = optimizers[step // 2 % 2]
        train(model, turn, range(step, step + 2))
        with shared_parameters(model):
            assert_equal_everywhere(model.parameters())
            assert not np.array_equal(before, flat(dict(model.named_parameters())))

"""Bad input: a clear error, before any communication, and the job goes on."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from horovod_oktopk import AgreementError, OptionError, PluginError
from horovod_oktopk.torch import OkTopk, step_report
from tests.torch.scenarios.common import (
    DENSE,
    backward,
    distribute,
    gradients,
    parameters,
    raised_everywhere,
)


def one_step(compression: Any, **arguments: Any) -> None:
    params = parameters()
    optimizer = distribute(params, compression, **arguments)
    backward(params, gradients(0, hvd.rank()))
    optimizer.step()


def check_a_lone_allreduce_is_refused() -> None:
    messages = raised_everywhere(PluginError, lambda: hvd.allreduce(torch.ones(3), compression=OkTopk()))
    assert "hvd.DistributedOptimizer" in messages[0]


def check_complex_gradients_are_refused() -> None:
    def step() -> None:
        weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        optimizer = distribute({"w": weight}, DENSE)
        weight.abs().sum().backward()
        optimizer.step()

    assert "'w'" in raised_everywhere(OptionError, step)[0]


def assert_disagreement(step: Any, *expected: str) -> None:
    if hvd.size() == 1:
        step()
        return
    messages = raised_everywhere(AgreementError, step)
    assert len(set(messages)) == 1, messages
    for text in expected:
        assert text in messages[0], messages[0]


def last() -> bool:
    return hvd.rank() == hvd.size() - 1


def check_a_report_of_another_optimizer_is_refused() -> None:
    optimizer = distribute(parameters(), hvd.Compression.none)
    assert "compression=OkTopk" in raised_everywhere(PluginError, lambda: step_report(optimizer))[0]

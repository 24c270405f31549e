"""Bad input: a clear error, before any communication, and the job goes on."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from horovod_oktopk import AgreementError, OptionError, PluginError
from horovod_oktopk.torch import OkTopk, step_report
from tests.torch import scenarios
from tests.torch.scenarios.common import (
    DENSE,
    SHAPES,
    N,
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


def check_adasum_min_and_product_are_refused() -> None:
    for op in (hvd.Adasum, hvd.Min, hvd.Product):
        messages = raised_everywhere(PluginError, lambda op=op: distribute(parameters(), DENSE, op=op))
        assert "hvd.Average or op=hvd.Sum" in messages[0]
    assert "Adasum" in raised_everywhere(PluginError, lambda: distribute(parameters(), OkTopk, op=hvd.Adasum))[0]


def check_a_process_set_without_this_rank_is_refused() -> None:
    if hvd.size() == 1:
        return
    others = scenarios.SETS[1] if hvd.rank() < hvd.size() - 1 else scenarios.SETS[0]
    messages = raised_everywhere(PluginError, lambda: distribute(parameters(), DENSE, process_set=others))
    assert f"rank {hvd.rank()} is not in the process set" in messages[hvd.rank()]


def check_join_is_refused() -> None:
    optimizer = distribute(parameters(), DENSE)
    assert "hvd.join()" in raised_everywhere(PluginError, hvd.join)[0]
    del optimizer


def check_a_lone_allreduce_is_refused() -> None:
    messages = raised_everywhere(PluginError, lambda: hvd.allreduce(torch.ones(3), compression=OkTopk()))
    assert "hvd.DistributedOptimizer" in messages[0]


def check_k_beyond_n_is_refused() -> None:
    messages = raised_everywhere(OptionError, lambda: one_step(OkTopk(k=N + 1)))
    assert f"k={N + 1}, n={N}" in messages[0]


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


def check_different_options() -> None:
    density = 0.2 if last() else 0.1
    assert_disagreement(lambda: one_step(OkTopk(density=density)), f"rank {hvd.size() - 1} has", "k: ")
    interval = 7 if last() else 8
    assert_disagreement(lambda: one_step(OkTopk(threshold_interval=interval)), "threshold_interval: 7",
                        "threshold_interval: 8")
    assert_disagreement(lambda: one_step(DENSE, op=hvd.Sum if last() else hvd.Average), "op: Sum", "op: Average")


def check_different_names_shapes_and_dtypes() -> None:
    def with_shapes(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        params = parameters(dtype, shapes)
        optimizer = distribute(params, OkTopk(k=3))
        sum(p.sum() for p in params.values()).backward()
        optimizer.step()

    renamed = {("z" if name == "d" and last() else name): shape for name, shape in SHAPES.items()}
    assert_disagreement(lambda: with_shapes(renamed), "parameter d", "parameter z")
    reshaped = {**SHAPES, "a.bias": (12,) if last() else (11,)}
    assert_disagreement(lambda: with_shapes(reshaped), "(11,)", "(12,)")
    dtype = torch.float16 if last() else torch.bfloat16
    assert_disagreement(lambda: with_shapes(SHAPES, dtype), "torch.float16", "torch.bfloat16")


def check_transports() -> None:
    if hvd.size() == 1:
        return
    if hvd.mpi_enabled():
        one_step(OkTopk(transport="mpi"))
        assert_disagreement(lambda: one_step(OkTopk(transport="mpi" if last() else "horovod")), "mpi", "horovod")
    else:
        assert "horovodrun --mpi" in raised_everywhere(PluginError, lambda: one_step(OkTopk(transport="mpi")))[0]
    one_step(OkTopk(transport="horovod"))


def check_a_report_of_another_optimizer_is_refused() -> None:
    optimizer = distribute(parameters(), hvd.Compression.none)
    assert "compression=OkTopk" in raised_everywhere(PluginError, lambda: step_report(optimizer))[0]

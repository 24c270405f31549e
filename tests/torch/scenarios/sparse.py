"""Sparse steps: against the dense oracle, with residuals, NaN, and the report."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch

from horovod_oktopk.torch import OkTopk, step_report
from tests.torch.scenarios.common import (
    N,
    assert_equal_everywhere,
    backward,
    distribute,
    everywhere,
    flat,
    gradients,
    parameters,
    topk,
)


def check_equals_the_oracle_with_residuals() -> None:
    for dtype, options in ((torch.float32, OkTopk(density=0.1, threshold_interval=1)),
                           (torch.float64, OkTopk(k=9, threshold_interval=1, region_interval=2)),
                           (torch.float32, OkTopk(density=0.1, threshold_interval=1, transport="horovod"))):
        params = parameters(dtype)
        optimizer = distribute(params, options, op=hvd.Sum)
        k = options.k_of(N)
        residuals = np.zeros((hvd.size(), N))
        expected = np.zeros(N)
        for step in range(5):
            optimizer.zero_grad()
            backward(params, gradients(step, hvd.rank(), dtype))
            optimizer.step()
            residuals += [flat(gradients(step, rank)) for rank in range(hvd.size())]
            local = np.array([topk(row, k) for row in residuals])
            update = topk(local.sum(axis=0), k)
            residuals[(local != 0) & (update != 0)] = 0
            expected -= update
            assert np.array_equal(flat(params), expected), f"step {step}, {options}"


def check_plain_class_takes_the_defaults() -> None:
    params = parameters()
    optimizer = distribute(params, OkTopk)
    backward(params, gradients(0, hvd.rank()))
    optimizer.step()
    report = step_report(optimizer)
    assert report is not None
    assert report.k == max(1, round(0.01 * N))
    assert np.count_nonzero(flat(params)) == report.global_selected == 1


def check_replicas_are_equal_and_volume_is_bounded_while_a_network_trains() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01),
                                         named_parameters=model.named_parameters(),
                                         compression=OkTopk(density=0.05, threshold_interval=4, region_interval=5))
    torch.manual_seed(hvd.rank())
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        inputs = torch.randn(32, 40)
        loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        report = step_report(optimizer)
        sent, _ = report.payload_bytes()
        assert sent <= 4 * 6 * report.k * (hvd.size() - 1) / hvd.size()
        assert 0 < report.local_selected <= report.k
    assert_equal_everywhere(model.parameters())
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def check_nan_on_one_rank_is_undone_on_all() -> None:
    for poison in (float("nan"), float("inf")):
        params = parameters()
        optimizer = distribute(params, OkTopk(density=0.1), op=hvd.Sum)
        backward(params, gradients(0, hvd.rank()))
        optimizer.step()
        before = optimizer.state_dict()["horovod_oktopk"][0]["residual"].clone()
        optimizer.zero_grad()
        grads = gradients(1, hvd.rank())
        if hvd.rank() == hvd.size() - 1:
            grads["c.scale"][1, 1, 1] = poison
        backward(params, grads)
        optimizer.synchronize()
        assert all(not torch.isfinite(p.grad).any() for p in params.values())
        assert not step_report(optimizer).finite
        after = optimizer.state_dict()["horovod_oktopk"][0]["residual"]
        assert torch.equal(before, after)
        with optimizer.skip_synchronize():
            for p in params.values():
                p.grad.zero_()
            optimizer.step()
        optimizer.zero_grad()
        backward(params, gradients(2, hvd.rank()))
        optimizer.step()
        assert step_report(optimizer).finite
        assert_equal_everywhere(params.values())


def check_half_precision_overflow_of_the_sum_is_undone() -> None:
    weight = torch.nn.Parameter(torch.zeros(8, dtype=torch.float16))
    optimizer = distribute({"w": weight}, OkTopk(k=2), op=hvd.Sum)
    (weight * torch.full((8,), 60000.0, dtype=torch.float16)).sum().backward()
    optimizer.synchronize()
    overflows = hvd.size() > 1
    assert bool(torch.isfinite(weight.grad).all()) != overflows
    assert step_report(optimizer).finite != overflows
    residual = optimizer.state_dict()["horovod_oktopk"][0]["residual"]
    assert int((residual == 0).sum()) == (8 if overflows else 2)
    with optimizer.skip_synchronize():
        optimizer.step()


def check_conservation_over_a_run() -> None:
    params = parameters()
    optimizer = distribute(params, OkTopk(density=0.05, threshold_interval=3), op=hvd.Sum)
    for step in range(12):
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank()))
        optimizer.step()
    residual = optimizer.state_dict()["horovod_oktopk"][0]["residual"].numpy()
    computed = sum(flat(gradients(step, rank)) for step in range(12) for rank in range(hvd.size()))
    assert np.array_equal(sum(everywhere(residual)) - flat(params), computed)


def check_report_is_written_to_tensorboard() -> None:
    params = parameters()
    optimizer = distribute(params, OkTopk(density=0.1))
    assert step_report(optimizer) is None
    backward(params, gradients(0, hvd.rank()))
    optimizer.step()
    written = {}

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            written[tag] = (value, step)

    report = step_report(optimizer)
    report.write(Writer())
    assert written["oktopk/k"] == (round(0.1 * N), 1)
    assert written["oktopk/local_selected"][0] == report.local_selected > 0
    assert {"accumulate", "select", "agree", "write_back"} <= set(report.phases)
    assert report.bytes_sent == sum(traffic.bytes_sent for traffic in report.phases.values())
    assert (report.bytes_sent > 0) == (hvd.size() > 1)
    totals = hvd.allgather_object((report.bytes_sent, report.bytes_received))
    assert sum(sent for sent, _ in totals) == sum(received for _, received in totals)

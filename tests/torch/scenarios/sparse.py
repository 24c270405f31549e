"""Sparse steps: against the dense oracle, with residuals, NaN, and the report."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch

from horovod_oktopk.torch import OkTopk, step_report
from tests.torch.scenarios.common import assert_equal_everywhere


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

"""Optimizers on process sets that overlap: right results, and a job that ends in order; see the test `ended`."""

from __future__ import annotations

import torch

from tests.scenarios.common import needs_ranks
from tests.torch.library import OkTopk, StepAhead, hvd, shared_parameters
from tests.torch.scenarios.common import descend, distribute, everywhere, flat


def check_optimizers_on_process_sets_that_overlap() -> None:
    needs_ranks(hvd, 4)
    members = [[0, 1, 3], [0, 2, 3]]  # other scenarios have others, and Horovod has each set once
    sets = [hvd.add_process_set(ranks) for ranks in members]
    trained = []
    for process_set in sets:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 3)
        trained.append((model, distribute(model, StepAhead(OkTopk(density=0.2)), lr=0.1, process_set=process_set)))
    for step in range(5):
        for model, optimizer in trained:
            torch.manual_seed(10 * step + hvd.rank())
            descend(optimizer, model(torch.randn(4, 8)).square().sum())
    for ranks, (model, optimizer) in zip(members, trained, strict=True):
        with shared_parameters(optimizer):
            found = everywhere(flat(dict(model.named_parameters())).tobytes())
        assert len({found[rank] for rank in ranks}) == 1, ranks
        assert len(set(found)) == 2, "the other rank trains for itself"

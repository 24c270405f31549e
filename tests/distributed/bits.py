"""Trains a small CNN by several options, and writes a digest of each, as JSON: the same under any launcher.

    torchrun --nproc-per-node P -m tests.distributed.bits FILE
    horovodrun -np P python -m tests.distributed.bits FILE
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.torch.library import OkTopk, StepAhead, gather_state_dict, hvd, shared_parameters

STEPS, READ_EVERY = 40, 10
SCHEME = OkTopk(density=0.05)
CASES: dict[str, tuple[Any, Any]] = {
    f"{mode}, {name}": (compression, make)
    for mode, compression in (("OkTopk", SCHEME), ("StepAhead", StepAhead(SCHEME)))
    for name, make in (("SGD", lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)),
                       ("AdamW", lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)))}


def digest_of(compression: Any, make: Any) -> str:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 10))
    optimizer = hvd.DistributedOptimizer(make(model), named_parameters=model.named_parameters(),
                                         compression=compression)
    digest = hashlib.sha256()
    for step in range(1, STEPS + 1):
        torch.manual_seed(100 * step + hvd.rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(16, 1, 8, 8)), torch.arange(16) % 10).backward()
        optimizer.step()
        if step % READ_EVERY == 0:
            with shared_parameters(optimizer):
                digest.update(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    shared = hvd.allgather_object(digest.hexdigest())
    assert len(set(shared)) == 1, shared
    for record in gather_state_dict(optimizer)["horovod_oktopk"]:  # of all ranks, on rank 0
        digest.update(record["residual"].numpy().tobytes())
    return digest.hexdigest()[:16]


def main(report: Path) -> None:
    hvd.init()
    torch.set_num_threads(1)
    found = {name: digest_of(*case) for name, case in CASES.items()}
    if hvd.rank() == 0:
        report.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

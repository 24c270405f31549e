"""Handwritten digits (they come with scikit-learn) in PyTorch, data-parallel with torchrun and StepAhead.

    torchrun --nproc-per-node 2 examples/minimal_torchrun.py
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

from horovod_oktopk.distributed import (
    DistributedOptimizer,
    OkTopk,
    StepAhead,
    broadcast_parameters,
    shared_parameters,
)

device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
dist.init_process_group("gloo")  # Our messages go over Gloo; "nccl" works, too, if other collectives need it.

torch.manual_seed(1)  # All ranks split the data in the same way.
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
training, test = random_split(data, [0.8, 0.2])
sampler = DistributedSampler(training)  # Each rank trains on its own part. All parts have the same size.
loader = DataLoader(training, batch_size=32, sampler=sampler)

# The plain model: DistributedDataParallel would send whole gradients.
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * dist.get_world_size(), momentum=0.9)
# StepAhead: send the largest 1 % of what the optimizer did to the parameters. All ranks get rank 0's parameters now.
optimizer = DistributedOptimizer(optimizer, model.named_parameters(), StepAhead(OkTopk(density=0.01)))
broadcast_parameters(model)  # The same for buffers, as of BatchNorm. This model has none.

for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    # StepAhead: evaluate and save the parameters that all ranks share.
    with shared_parameters(optimizer), torch.no_grad():
        x, y = test[:]
        accuracy = (model(x.to(device)).argmax(1) == y.to(device)).float().mean()
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}", flush=True)
dist.destroy_process_group()

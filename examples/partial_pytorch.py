"""Handwritten digits (they come with scikit-learn) in PyTorch, on ranks that are slow in turn: with Partial the
others do not wait. It needs MPI.

    horovodrun --mpi -np 2 -H localhost:2 python examples/partial_pytorch.py
"""

import time

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

from horovod_oktopk.torch import OkTopk, Partial, synchronize_replicas

hvd.init()  # Horovod: start.
torch.manual_seed(1)  # Horovod: all ranks split the data in the same way.
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
training, test = random_split(data, [0.8, 0.2])
# Horovod: each rank trains on its own part. All parts have the same size.
sampler = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(training, batch_size=32, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size())
# Horovod: wrap the optimizer. Partial: a step takes the gradients of the ranks that have come.
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                     compression=Partial(OkTopk(density=0.05), policy="majority"))
# Horovod: all ranks start from the same parameters and optimizer state.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(10):
    sampler.set_epoch(epoch)  # Horovod: shuffle again.
    for step, (x, y) in enumerate(loader):
        if step % hvd.size() == hvd.rank():
            time.sleep(0.02)  # This rank is late. In your program, longer sequences or other work may be the cause.
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    # Partial: wait for all ranks, so that they have the same parameters.
    synchronize_replicas(optimizer)
    x, y = test[:]
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean()
    if hvd.rank() == 0:  # Horovod: one rank reports.
        print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}", flush=True)

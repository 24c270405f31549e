"""Handwritten digits (they come with scikit-learn) in PyTorch, data-parallel with Horovod and StepAhead.

    horovodrun -np 2 -H localhost:2 python examples/minimal_pytorch.py
"""

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

from horovod_oktopk.torch import OkTopk, StepAhead, shared_parameters

hvd.init()  # Horovod: start.
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(hvd.local_rank())  # Horovod: pin one GPU to each rank.

torch.manual_seed(1)  # Horovod: all ranks split the data in the same way.
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
training, test = random_split(data, [0.8, 0.2])
# Horovod: each rank trains on its own part. All parts have the same size.
sampler = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(training, batch_size=32, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
# Horovod: scale the learning rate by the number of ranks.
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
# Horovod: wrap the optimizer. StepAhead: send the largest 1 % of what the optimizer did to the parameters.
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                     compression=StepAhead(OkTopk(density=0.01)))
# Horovod: all ranks start from the same parameters and optimizer state.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(10):
    sampler.set_epoch(epoch)  # Horovod: shuffle again.
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    # StepAhead: evaluate and save the parameters that all ranks share.
    with shared_parameters(optimizer), torch.no_grad():
        x, y = test[:]
        accuracy = (model(x.to(device)).argmax(1) == y.to(device)).float().mean()
    if hvd.rank() == 0:  # Horovod: one rank reports.
        print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}", flush=True)

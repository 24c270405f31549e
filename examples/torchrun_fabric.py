"""Handwritten digits in a loop with Lightning's Fabric, data-parallel with torchrun and StepAhead.

    torchrun --nproc-per-node 2 examples/torchrun_fabric.py
"""

import os

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from horovod_oktopk.distributed import DistributedOptimizer, OkTopk, StepAhead, leave_gradients, shared_parameters

ranks, here = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))  # torchrun sets them.
fabric = Fabric(strategy="ddp", devices=here, num_nodes=ranks // here)
fabric.launch()
fabric.seed_everything(1)  # All ranks split the data in the same way.
images, labels = load_digits(return_X_y=True)
training, test = random_split(TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels)), [1437, 360])

# Fabric moves the model to its device, and wraps it in DistributedDataParallel, which is to send no gradients.
model = fabric.setup_module(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
leave_gradients(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * ranks, momentum=0.9)
# StepAhead: send the largest 1 % of what the optimizer did to the parameters.
optimizer = DistributedOptimizer(optimizer, model.named_parameters(), StepAhead(OkTopk(density=0.01)))
optimizer = fabric.setup_optimizers(optimizer)
# Fabric gives each rank its own batches.
loader = fabric.setup_dataloaders(DataLoader(training, batch_size=32, shuffle=True))

for _ in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()

# StepAhead: evaluate and save the parameters that all ranks share. Here each rank evaluates all of the test data.
with shared_parameters(model), torch.no_grad():
    x, y = (tensor.to(fabric.device) for tensor in test[:])
    output = model(x)
    accuracy, loss = (output.argmax(1) == y).float().mean(), nn.functional.cross_entropy(output, y)
print(f"rank {fabric.global_rank}: test accuracy {accuracy:.1%}, loss {loss.item()}", flush=True)

"""Handwritten digits as images: a convolutional network with BatchNorm and a learning-rate schedule in PyTorch,
data-parallel with Horovod and StepAhead. It saves the model after the last epoch.

    horovodrun -np 2 -H localhost:2 python examples/cnn_pytorch.py
"""

from pathlib import Path

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

from horovod_oktopk.torch import OkTopk, StepAhead, shared_parameters

EPOCHS = 10


def block(channels_in, channels_out):
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out),
                         nn.ReLU(), nn.MaxPool2d(2))


hvd.init()
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(hvd.local_rank())  # Horovod: pin one GPU to each rank.

torch.manual_seed(1)  # Horovod: all ranks split the data in the same way.
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
training, test = random_split(TensorDataset(images, torch.tensor(labels)), [0.8, 0.2])
# Horovod: each rank trains on its own part, and tests on its own part.
train_sampler = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank())
test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
train_loader = DataLoader(training, batch_size=32, sampler=train_sampler)
test_loader = DataLoader(test, batch_size=256, sampler=test_sampler)

model = nn.Sequential(block(1, 16), block(16, 32), nn.Flatten(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9, weight_decay=1e-4)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                     compression=StepAhead(OkTopk(density=0.01)))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train_loader))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for epoch in range(EPOCHS):
    model.train()
    train_sampler.set_epoch(epoch)
    for x, y in train_loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        schedule.step()

    model.eval()
    with shared_parameters(optimizer), torch.no_grad():  # StepAhead: test and save what all ranks share.
        correct = torch.cat([model(x.to(device)).argmax(1) == y.to(device) for x, y in test_loader])
        accuracy = hvd.allreduce(correct.float().mean(), name="accuracy")  # Horovod: average over the ranks.
        if epoch == EPOCHS - 1 and hvd.rank() == 0:
            # BatchNorm: each rank has its own running means, as in stock Horovod. The file has those of rank 0.
            Path("runs").mkdir(exist_ok=True)
            torch.save(model.state_dict(), "runs/cnn_pytorch.pt")
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}", flush=True)

"""Handwritten digits in PyTorch with StepAhead, as a function that the launchers beside this file start.

    horovodrun -np 2 -H localhost:2 python examples/launch_digits.py
    mpirun -np 2 -H localhost:2 -x PATH python examples/launch_digits.py
    srun --ntasks 2 --mpi=pmix python examples/launch_digits.py
"""

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn


def train(epochs: int = 10) -> str:
    """Train on this rank's part of the digits, and return the accuracy and the loss on the test data."""
    from horovod_oktopk.torch import OkTopk, StepAhead, shared_parameters  # Here: the ranks run this function alone.

    hvd.init()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(hvd.local_rank())  # Horovod: pin one GPU to each rank.

    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32, device=device) / 16, torch.tensor(labels, device=device)
    order = torch.randperm(len(x))
    test, training = order[:360], order[360:]
    part = training[hvd.rank()::hvd.size()][:len(training) // hvd.size()]  # the same size on all ranks

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         compression=StepAhead(OkTopk(density=0.01)))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(epochs):
        for batch in part[torch.randperm(len(part))].split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()

    with torch.no_grad(), shared_parameters(optimizer):  # StepAhead: evaluate what all ranks share.
        output = model(x[test])
        accuracy = (output.argmax(1) == y[test]).float().mean()
        loss = nn.functional.cross_entropy(output, y[test])
    network = "MPI" if hvd.mpi_enabled() else "Gloo"
    return f"rank {hvd.rank()}: test accuracy {accuracy:.1%}, loss {loss.item()}, Horovod on {network}"


if __name__ == "__main__":
    print(train(), flush=True)

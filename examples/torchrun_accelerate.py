"""Handwritten digits in a loop with Hugging Face's Accelerate, data-parallel with torchrun and StepAhead.

    torchrun --nproc-per-node 2 examples/torchrun_accelerate.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from horovod_oktopk.distributed import DistributedOptimizer, OkTopk, StepAhead, shared_parameters

accelerator = Accelerator(cpu=not torch.cuda.is_available())  # Else each rank is alone on a CPU.
set_seed(1)  # All ranks split the data in the same way.
images, labels = load_digits(return_X_y=True)
training, test = random_split(TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels)), [1437, 360])

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
# evaluation_mode: move the model to its device and set up mixed precision, without DistributedDataParallel, which
# would send whole gradients.
model = accelerator.prepare_model(model, evaluation_mode=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * accelerator.num_processes, momentum=0.9)
# StepAhead: send the largest 1 % of what the optimizer did to the parameters. All ranks get rank 0's parameters now.
optimizer = DistributedOptimizer(optimizer, model.named_parameters(), StepAhead(OkTopk(density=0.01)))
# Accelerate gives each rank its own batches.
optimizer, loader = accelerator.prepare(optimizer, DataLoader(training, batch_size=32, shuffle=True))

for _ in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()

# StepAhead: evaluate and save the parameters that all ranks share. Here each rank evaluates all of the test data.
with shared_parameters(model), torch.no_grad():
    x, y = (tensor.to(accelerator.device) for tensor in test[:])
    output = model(x)
    accuracy, loss = (output.argmax(1) == y).float().mean(), nn.functional.cross_entropy(output, y)
print(f"rank {accelerator.process_index}: test accuracy {accuracy:.1%}, loss {loss.item()}", flush=True)
accelerator.end_training()

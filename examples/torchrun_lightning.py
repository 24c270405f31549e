"""Handwritten digits with Lightning's Trainer, data-parallel with torchrun and StepAhead.

    torchrun --nproc-per-node 2 examples/torchrun_lightning.py
"""

import os
from contextlib import ExitStack

import lightning.pytorch as lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from horovod_oktopk.distributed import DistributedOptimizer, OkTopk, StepAhead, leave_gradients, shared_parameters


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def configure_optimizers(self):
        leave_gradients(self.trainer.model)  # It is in DistributedDataParallel, which is to send no gradients.
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05 * self.trainer.world_size, momentum=0.9)
        return DistributedOptimizer(optimizer, self.named_parameters(), StepAhead(OkTopk(density=0.01)))

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch):
        output = self.layers(batch[0])
        self.log("accuracy", (output.argmax(1) == batch[1]).float().mean())
        self.log("loss", nn.functional.cross_entropy(output, batch[1]))


class SharedParameters(lightning.Callback):
    """StepAhead: validate, save and load inside shared_parameters.

    This takes a `with` block that begins in one hook of Lightning and ends in another one, so an ExitStack holds the
    block open: from the beginning of a validation, while Lightning saves its checkpoint, until the next batch trains;
    and after fit, when the best model may be loaded.
    """

    def __init__(self):
        self.block = ExitStack()

    def on_validation_start(self, _, module):
        self.block.enter_context(shared_parameters(module))

    def on_train_batch_start(self, *_):
        self.block.close()  # Does nothing if no block is open.

    def on_fit_end(self, _, module):
        self.block.enter_context(shared_parameters(module))


ranks, here = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))  # torchrun sets them.
lightning.seed_everything(1)
images, labels = load_digits(return_X_y=True)
training, test = random_split(TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels)), [1437, 360])
# use_distributed_sampler=False: Lightning would have each rank validate with its own part of the test data.
trainer = lightning.Trainer(max_epochs=10, strategy="ddp", devices=here, num_nodes=ranks // here, logger=False,
                            use_distributed_sampler=False, callbacks=[SharedParameters()], enable_progress_bar=False,
                            default_root_dir="runs")
loader = DataLoader(training, 32, sampler=DistributedSampler(training, trainer.world_size, trainer.global_rank))
trainer.fit(Digits(), loader, DataLoader(test, 360))
accuracy, loss = (trainer.callback_metrics[name].item() for name in ("accuracy", "loss"))
print(f"rank {trainer.global_rank}: test accuracy {accuracy:.1%}, loss {loss}", flush=True)

"""Handwritten digits with Lightning's Trainer, data-parallel with Horovod and StepAhead. Each rank has a Trainer of
one device.

    horovodrun -np 2 -H localhost:2 python examples/trainer_lightning.py
"""

from contextlib import ExitStack

import horovod.torch as hvd
import lightning.pytorch as lightning
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from horovod_oktopk.torch import OkTopk, StepAhead, shared_parameters


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def configure_optimizers(self):
        hvd.broadcast_parameters(self.state_dict(), root_rank=0)
        return hvd.DistributedOptimizer(torch.optim.SGD(self.parameters(), lr=0.05 * hvd.size(), momentum=0.9),
                                        self.named_parameters(), compression=StepAhead(OkTopk(density=0.01)))

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


hvd.init()
devices = [hvd.local_rank()] if torch.cuda.is_available() else 1  # Horovod: pin one GPU to each rank.
lightning.seed_everything(1)
images, labels = load_digits(return_X_y=True)
training, test = random_split(TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels)), [0.8, 0.2])
loader = DataLoader(training, 32, sampler=DistributedSampler(training, hvd.size(), hvd.rank()))
trainer = lightning.Trainer(max_epochs=10, devices=devices, plugins=[LightningEnvironment()], logger=False,
                            callbacks=[SharedParameters()], enable_progress_bar=False,
                            enable_checkpointing=hvd.rank() == 0, default_root_dir="runs")
trainer.fit(Digits(), loader, DataLoader(test, 360))
print(f"rank {hvd.rank()}: { {name: value.item() for name, value in trainer.callback_metrics.items()} }")

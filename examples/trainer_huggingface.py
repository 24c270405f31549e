"""Handwritten digits with a small vision transformer and Hugging Face's Trainer, data-parallel with Horovod and
StepAhead. Each rank has a Trainer of one device.

    horovodrun -np 2 -H localhost:2 python examples/trainer_huggingface.py
"""

import os

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Subset, random_split
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from horovod_oktopk.torch import OkTopk, StepAhead, shared_parameters


class HorovodTrainer(Trainer):
    def create_optimizer(self, *args):
        if self.optimizer is None:  # Else train() was called before.
            optimizer = super().create_optimizer(*args)
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            self.optimizer = hvd.DistributedOptimizer(
                optimizer, self.model.named_parameters(), compression=StepAhead(OkTopk(density=0.01)))
        return self.optimizer

    # StepAhead: evaluate, save and load what all ranks share.
    def evaluate(self, *args, **kwargs):
        with shared_parameters(self.model):
            return super().evaluate(*args, **kwargs)

    def save_model(self, *args, **kwargs):
        with shared_parameters(self.model):
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, *args, **kwargs):  # The model, and afterwards the optimizer.
        with shared_parameters(self.model):
            super()._save_checkpoint(*args, **kwargs)

    def _load_best_model(self):  # For load_best_model_at_end=True.
        with shared_parameters(self.model):
            super()._load_best_model()


hvd.init()
# Horovod: pin one GPU to each rank, before CUDA starts. Trainer would spread the model over all GPUs that it sees.
os.environ["CUDA_VISIBLE_DEVICES"] = str(hvd.local_rank())

torch.manual_seed(1)  # Horovod: all ranks split the data in the same way.
images, labels = load_digits(return_X_y=True)
pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
data = [{"pixel_values": image, "labels": label} for image, label in zip(pixels, labels, strict=True)]
training, test = random_split(data, [0.8, 0.2])
length = len(training) // hvd.size()  # Horovod: each rank has its own part.
part = Subset(training, range(hvd.rank() * length, (hvd.rank() + 1) * length))

model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=32,
                                            num_hidden_layers=2, num_attention_heads=4, intermediate_size=64))
arguments = TrainingArguments(f"runs/huggingface/rank-{hvd.rank()}", num_train_epochs=20, learning_rate=1e-2,
                              per_device_train_batch_size=32, save_strategy="no", report_to=[])
trainer = HorovodTrainer(model, arguments, train_dataset=part, eval_dataset=test, compute_metrics=lambda result: {
    "accuracy": (result.predictions.argmax(1) == result.label_ids).mean()})
trainer.train()
print(f"rank {hvd.rank()}: {trainer.evaluate()}")

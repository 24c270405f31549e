"""Handwritten digits with a small vision transformer and Hugging Face's Trainer, data-parallel with torchrun and
StepAhead.

    torchrun --nproc-per-node 2 examples/torchrun_huggingface.py
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import default_collate, random_split
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

from horovod_oktopk.distributed import DistributedOptimizer, OkTopk, StepAhead, leave_gradients, shared_parameters


class SparseTrainer(Trainer):
    def create_optimizer(self, *args):
        if self.optimizer is None:  # Else train() was called before.
            optimizer = super().create_optimizer(*args)
            self.optimizer = DistributedOptimizer(optimizer, self.model.named_parameters(),
                                                  StepAhead(OkTopk(density=0.01)))
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


class LeaveGradients(TrainerCallback):
    def on_train_begin(self, *_, **__):  # The model is in DistributedDataParallel now: it is to send no gradients.
        leave_gradients(trainer.model_wrapped)


set_seed(1)  # All ranks split the data in the same way.
images, labels = load_digits(return_X_y=True)
pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
data = [{"pixel_values": image, "labels": label} for image, label in zip(pixels, labels, strict=True)]
training, test = random_split(data, [1437, 360])

model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=32,
                                            num_hidden_layers=2, num_attention_heads=4, intermediate_size=64))
arguments = TrainingArguments("runs/torchrun", num_train_epochs=20, learning_rate=1e-2, report_to=[],
                              per_device_train_batch_size=32, per_device_eval_batch_size=180, disable_tqdm=True,
                              save_strategy="no", eval_strategy="epoch",
                              use_cpu=not torch.cuda.is_available())  # Else each rank trains alone on a CPU.
trainer = SparseTrainer(model, arguments, train_dataset=training, eval_dataset=test, callbacks=[LeaveGradients()],
                        compute_metrics=lambda result: {
                            "accuracy": (result.predictions.argmax(1) == result.label_ids).mean()})
trainer.train()

# trainer.evaluate() gathers the ranks' parts of the test data. Here each rank evaluates all of it.
with shared_parameters(model), torch.no_grad():
    batch = {name: tensor.to(model.device) for name, tensor in default_collate(list(test)).items()}
    output = model.eval()(**batch)
    accuracy = (output.logits.argmax(1) == batch["labels"]).float().mean()
print(f"rank {trainer.args.process_index}: test accuracy {accuracy:.1%}, loss {output.loss.item()}", flush=True)
torch.distributed.destroy_process_group()

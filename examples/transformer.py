"""A language model in PyTorch (a small transformer, trained by AdamW), with all that a real script has:
step-ahead error feedback, warm-up and decay of the learning rate, clipping, evaluation, checkpoints, and resuming.

    horovodrun -np 2 -H localhost:2 python examples/transformer.py --checkpoint model.pt

It learns English from the texts of Python's own help(), or from any text file: --text FILE. --compression dense and
--compression oktopk train the same model with Horovod's allreduce, and with sparse gradients.
"""

import argparse
import logging
import math
import pydoc_data.topics
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn
from tqdm import tqdm

from horovod_oktopk.torch import OkTopk, StepAhead, gather_state_dict, shared_parameters, step_report

LENGTH, WIDTH = 64, 128
COMPRESSIONS = {"dense": hvd.Compression.none, "oktopk": OkTopk(density=0.01),
                "step-ahead": StepAhead(OkTopk(density=0.01))}


class LanguageModel(nn.Module):
    """Predicts each next byte from those before it."""

    def __init__(self, layers=4, heads=4):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, heads, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, 256)

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=text.device)
        return self.output(self.layers(self.embedding(text) + self.position, mask, is_causal=True))


def loss_of(model, text, starts):
    """Return the mean loss per byte of the sequences that begin at `starts`."""
    chosen = text[(starts[:, None] + torch.arange(LENGTH + 1)).to(text.device)]
    return nn.functional.cross_entropy(model(chosen[:, :-1]).transpose(1, 2), chosen[:, 1:])


def validation_loss(model, text):
    """Return the mean loss of all of the text. Horovod: every rank takes its part, and all get the mean."""
    starts = torch.arange(0, len(text) - LENGTH - 1, LENGTH)
    starts = starts[:len(starts) // hvd.size() * hvd.size()]  # parts of the same size
    with torch.no_grad():
        losses = [loss_of(model, text, part) for part in starts[hvd.rank()::hvd.size()].split(64)]
    return hvd.allreduce(torch.stack(losses).mean(), name="validation loss").item()


def train(model, optimizer, schedule, text, random, arguments):
    """Train for one epoch, on sequences that this rank draws for itself."""
    steps = tqdm(range(arguments.steps), disable=hvd.rank() != 0, leave=False)
    for _ in steps:
        starts = torch.randint(len(text) - LENGTH - 1, (arguments.batch_size,), generator=random)
        optimizer.zero_grad()
        loss_of(model, text, starts).backward()
        optimizer.synchronize()  # Horovod: clip what all ranks have summed up; StepAhead: this rank's own gradients
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text file to learn (Python's help texts)")
    parser.add_argument("--compression", choices=COMPRESSIONS, default="step-ahead")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of an epoch (200)")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per rank and step (16)")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate (0.001)")
    parser.add_argument("--stop-after", type=int, help="end after this epoch, to be resumed")
    parser.add_argument("--checkpoint", type=Path, help="written after every epoch, and resumed from if it is there")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    sparse = arguments.compression != "dense"
    hvd.init()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(hvd.local_rank())  # Horovod: pin one GPU to each rank
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    content = arguments.text.read_bytes() if arguments.text else "".join(pydoc_data.topics.topics.values()).encode()
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long().to(device)
    training, validation = text[:-len(text) // 10], text[-len(text) // 10:]

    torch.manual_seed(1)
    model = LanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         compression=COMPRESSIONS[arguments.compression])
    total = arguments.epochs * arguments.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 0.55 + 0.45 * math.cos(math.pi * step / total)))
    first = 0
    with shared_parameters(optimizer):  # StepAhead: load, save and evaluate what all ranks share
        if arguments.checkpoint and arguments.checkpoint.exists():  # Horovod: each rank takes its own part
            saved = torch.load(arguments.checkpoint, weights_only=True, map_location="cpu")  # it has P residuals
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
            first = saved["epoch"]
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for epoch in range(first, arguments.stop_after or arguments.epochs):
        random = torch.Generator().manual_seed(epoch * hvd.size() + hvd.rank())
        train(model, optimizer, schedule, training, random, arguments)
        with shared_parameters(optimizer):
            loss = validation_loss(model, validation)
            if arguments.checkpoint:  # Horovod: one rank saves, with what each rank has not sent yet
                state = gather_state_dict(optimizer) if sparse else optimizer.state_dict()
                if hvd.rank() == 0:
                    torch.save({"model": model.state_dict(), "optimizer": state, "schedule": schedule.state_dict(),
                                "epoch": epoch + 1}, arguments.checkpoint)
        if hvd.rank() == 0:
            sent = f", {step_report(optimizer).bytes_sent:,} bytes sent in a step" if sparse else ""
            print(f"epoch {epoch + 1}: validation loss {loss:.3f}{sent}", flush=True)


if __name__ == "__main__":
    main()

"""Loss of OkTopk alone against dense training, if the training is three and ten times as long.

An LSTM on characters, SGD with momentum, 4 ranks, a schedule as long as the training. Each method has the rate that
is best for it, found with the first seed and length.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.pytorch_ranks import train_on_threads
from benchmarks.accuracy.pytorch_text import make, make_text_parser
from benchmarks.output import BLUE, GREY, ORANGE, Line, draw_lines

METHODS = {"dense": ("none", GREY), "OkTopk, density 1 %": ("oktopk --density 0.01", ORANGE),
           "OkTopk, density 2 %": ("oktopk --density 0.02", BLUE)}


def measure(progress: Any, seeds: int = 3, rates: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0),
            lengths: Sequence[int] = (1, 3, 10), small: str = "--hidden 64 --sequence 16 --batch-size 32",
            ) -> dict[str, Any]:
    """Return the rate of each method, and the validation losses of the seeds, by method, by epochs."""
    def train(name: str, rate: float, epochs: int, seed: int) -> float:
        line = f"{small} --threads 4 --compression {METHODS[name][0]} --lr {rate} --epochs {epochs} --seed {seed}"
        loss = train_on_threads(make, make_text_parser().parse_args(line.split()))["validation_loss"]
        return float(loss) if math.isfinite(loss) else math.inf

    tried = {name: {rate: train(name, rate, lengths[0], 1) for rate in rates} for name in progress(METHODS, "rates")}
    best = {name: min(losses, key=losses.__getitem__) for name, losses in tried.items()}
    found: dict[str, Any] = {name: {str(epochs): [] for epochs in lengths} for name in METHODS}
    for name, epochs, seed in progress([(name, epochs, seed) for seed in range(1, seeds + 1) for epochs in lengths
                                        for name in METHODS], "convergence"):
        found[name][str(epochs)].append(train(name, best[name], epochs, seed))
    return {"rates": best, "losses": found}


def rows(found: dict[str, Any]) -> list[list[str]]:
    dense = found["losses"]["dense"]
    return [["Loss", "Rate", *(f"epochs: {epochs}" for epochs in dense)],
            *([name, f"{found['rates'][name]:g}", *(_shown(losses[epochs], dense[epochs]) for epochs in losses)]
              for name, losses in found["losses"].items())]


def _shown(values: list[float], dense: list[float]) -> str:
    mean = statistics.fmean(values)
    above = "" if values is dense else f", {mean / statistics.fmean(dense) - 1:+.1%}"
    return f"{mean:.4f} ({min(values):.4f} to {max(values):.4f}){above}"


def plot(found: dict[str, Any], path: Path) -> None:
    lines: dict[str, Line] = {
        name: ([int(epochs) for epochs in losses], [statistics.fmean(each) for each in losses.values()],
               {"marker": "o", "color": METHODS[name][1]}) for name, losses in found["losses"].items()}
    draw_lines(path, lines, xlabel="epochs of the whole training", ylabel="validation loss (nats per character)",
               xscale="log")

"""The figures of the Ok-Topk paper in small, from a training in one process.

    python -m benchmarks.paper.figures --json runs/figures.json --plot runs/figures.png

A character LSTM on the text of Python's `help()` is trained data-parallel. As replicas are equal, one model serves
all ranks: every rank's gradient comes from a batch of its own, the ranks reduce as threads with the package's
algorithm and accumulators, and the update is applied once. Measured at every step: ξ of Assumption 1 (Figure 5),
what is selected (Figure 6), how even regions and blocks are (Figure 7), and the fill-in of TopkDSA (Section 5.2).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks import output
from benchmarks.paper import skewed
from benchmarks.paper.balance import REGION_INTERVAL, Splits, gather_figures
from benchmarks.paper.data_parallel import Ranks, Training
from benchmarks.paper.figures_plots import plot
from benchmarks.paper.figures_tables import Series, show
from benchmarks.paper.selection import THRESHOLD_INTERVAL, PlainReuse, fill_in, selected, xi
from horovod_oktopk import OkTopk, TopkDSA
from horovod_oktopk.vectors import wire

SKEWED_STEPS = 8


def index_in_a_word(count: int, _span: int) -> tuple[int, int, int]:
    """The layout of a message's indices that the paper counts with: a word for each, and no code."""
    return wire.WORD_BITS, count, 0


def append(series: Series, figures: dict[str, float], prefix: str = "") -> None:
    for name, value in figures.items():
        series.setdefault(prefix + name, []).append(value)


def train(arguments: argparse.Namespace, density: float, advance: Callable[[], object]) -> dict[str, Any]:
    """A training with OkTopk, and everything that is measured in its steps."""
    size = arguments.ranks
    training = Training(arguments, size)
    n = training.n
    ranks = Ranks(OkTopk(density=density, selection="reuse", threshold_interval=THRESHOLD_INTERVAL,
                         region_interval=REGION_INTERVAL),
                  size, n)
    k = ranks.k
    splits = Splits(n, size)
    reuses = {"reuse": PlainReuse(size, n, k, False), "reuse, own residual": PlainReuse(size, n, k, True)}
    series: Series = {}
    for t in range(1, arguments.steps + 1):
        gradients = training.gradients()
        accumulated = ranks.accumulated(gradients)
        outcomes = ranks.reduce(gradients)
        training.apply(outcomes[0].update)
        append(series, xi(accumulated, gradients, outcomes, k), "xi: ")
        append(series, selected(accumulated, outcomes, density))
        for name, reuse in reuses.items():
            local, global_ = reuse.step(t, accumulated, gradients)
            append(series, {f"local: {name}": local, f"global: {name}": global_})
        append(series, splits.step(t, outcomes, k), "split: ")
        append(series, gather_figures(outcomes, ranks.algorithms[0].boundaries, k), "gather: ")
        append(series, fill_in([outcome.selection for outcome in outcomes], k), "fill-in: ")
        advance()
    return {"n": n, "k": k, "losses": training.losses, "series": series}


def train_topkdsa(arguments: argparse.Namespace, advance: Callable[[], object]) -> dict[str, Any]:
    """The fill-in in a training with TopkDSA, at the first density, among more ranks."""
    density = arguments.densities[0]
    training = Training(arguments, arguments.fill_ranks)
    ranks = Ranks(TopkDSA(density=density), arguments.fill_ranks, training.n)
    series: Series = {}
    for _ in range(arguments.fill_steps):
        outcomes = ranks.reduce(training.gradients())
        training.apply(outcomes[0].update)
        append(series, fill_in([outcome.selection for outcome in outcomes], ranks.k))
        advance()
    return {"density": density, "k": ranks.k, "ranks": arguments.fill_ranks, "series": series}


def measure_skewed(arguments: argparse.Namespace, advance: Callable[[], object]) -> dict[str, Series]:
    """Figure 7 where the ranks' top-k crowd, by case."""
    found, n = {}, arguments.skewed_parameters
    for number, case in enumerate(skewed.CASES):
        ranks = Ranks(OkTopk(density=skewed.DENSITY), arguments.ranks, n)
        randoms = [np.random.default_rng([arguments.seed, number, rank]) for rank in range(arguments.ranks)]
        splits = Splits(n, arguments.ranks)
        series: Series = {}
        for t in range(1, SKEWED_STEPS + 1):
            outcomes = ranks.reduce([skewed.skewed_gradient(case, n, rank, arguments.ranks, random)
                                     for rank, random in enumerate(randoms)])
            append(series, splits.step(t, outcomes, ranks.k), "split: ")
            append(series, gather_figures(outcomes, ranks.algorithms[0].boundaries, ranks.k), "gather: ")
            advance()
        found[case] = series
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    total = len(arguments.densities) * arguments.steps + arguments.fill_steps + len(skewed.CASES) * SKEWED_STEPS
    with tqdm(total=total, unit="step") as progress:
        trainings = {}
        for density in arguments.densities:
            progress.set_description(f"density {density:g}")
            trainings[f"{density:g}"] = train(arguments, density, progress.update)
        progress.set_description("TopkDSA")
        fill = train_topkdsa(arguments, progress.update)
        progress.set_description("skewed")
        crowded = measure_skewed(arguments, progress.update)
    return {"arguments": output.as_text(arguments), "ranks": arguments.ranks,
            "training": trainings, "fill_in": fill, "skewed": crowded}


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = output.make_parser(__doc__, "figures")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.01, 0.02])
    parser.add_argument("--steps", type=int, default=160, help="of each training with OkTopk")
    parser.add_argument("--fill-ranks", type=int, default=16, help="of the training with TopkDSA; a power of two")
    parser.add_argument("--fill-steps", type=int, default=64)
    parser.add_argument("--skewed-parameters", type=int, default=400_000, help="elements of the skewed gradients")
    parser.add_argument("--hidden", type=int, default=512, help="of the LSTM")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank")
    parser.add_argument("--sequence", type=int, default=64, help="characters of a sequence")
    parser.add_argument("--lr", type=float, default=0.002, help="of Adam")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(line)
    check(arguments)
    return arguments


def check(arguments: argparse.Namespace) -> None:
    """Raises SystemExit where an argument is not allowed."""
    if not 2 <= arguments.ranks <= 64:
        raise SystemExit(f"figures: --ranks must be from 2 to 64; got {arguments.ranks}")
    if not 2 <= arguments.fill_ranks <= 64 or arguments.fill_ranks & (arguments.fill_ranks - 1):
        raise SystemExit(f"figures: --fill-ranks must be a power of two from 2 to 64; got {arguments.fill_ranks}")
    for density in arguments.densities:
        if not 0 < density <= 1:
            raise SystemExit(f"figures: --densities must be in (0, 1]; got {density:g}")
    if arguments.skewed_parameters < 10_000:
        raise SystemExit(f"figures: --skewed-parameters must be at least 10000; got {arguments.skewed_parameters}")
    for name in ("steps", "fill_steps", "hidden", "batch_size", "sequence"):
        value = getattr(arguments, name)
        if value < 1:
            raise SystemExit(f"figures: --{name.replace('_', '-')} must be at least 1; got {value}")


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    torch.set_num_threads(1)
    wire._index_words = index_in_a_word  # type: ignore[assignment]
    results = measure(arguments)
    show(results, output.make_console())
    output.write_json(arguments.json, results)
    plot(results, arguments.plot)


if __name__ == "__main__":
    main()

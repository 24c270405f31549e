"""The figures of the Ok-Topk paper in small, from a training in one process.

    python -m benchmarks.paper.figures --json runs/figures.json --plot runs/figures.png

A character LSTM on the text of Python's `help()` is trained data-parallel. As replicas are equal, one model serves
all ranks: every rank's gradient comes from a batch of its own, the ranks reduce as threads with the package's
algorithm and accumulators, and the update is applied once. Measured at every step: ξ of Assumption 1 (Figure 5),
what is selected (Figure 6), how even regions and blocks are (Figure 7), and the fill-in of TopkDSA (Section 5.2).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from horovod_oktopk import OkTopk, TopkDSA
from horovod_oktopk.options import Scheme
from horovod_oktopk.phases.balance_gather import plan_balance, ring_elements
from horovod_oktopk.phases.regions import owner_rotation
from horovod_oktopk.schemes.gaussiank import gaussian_threshold
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.schemes.topkdsa import equal_regions
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.selection.local_top_k import kth_magnitude, top_k
from horovod_oktopk.transport.counting import CountingTransport
from horovod_oktopk.transport.local import LocalTransport, run_ranks
from horovod_oktopk.vectors import wire
from horovod_oktopk.vectors.sparse import SparseVector, sum_of

THRESHOLD_INTERVAL, REGION_INTERVAL = 32, 64
"""τ′ and τ of the paper, and the package's defaults."""
WORD = 4


def index_in_a_word(count: int, _span: int) -> tuple[int, int, int]:
    """The layout of a message's indices that the paper counts with: a word for each, and no code."""
    return wire.WORD_BITS, count, 0


wire._index_words = index_in_a_word
SKEWED_DENSITY, SKEWED_STEPS = 0.01, 8
SPLITS = {"equal split": "#999999", "averaged cuts (paper)": "#dd8452", "OkTopk": "#4c72b0"}
GATHERS = {"direct": "#999999", "always balanced": "#dd8452", "OkTopk": "#4c72b0"}
Gradients = list[NDArray[np.float32]]
"""One of n elements for each rank."""
Series = dict[str, list[float]]
"""Values by step, by name."""


class CharacterModel(nn.Module):
    """Predicts each next character."""

    def __init__(self, characters: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 32)
        self.lstm = nn.LSTM(32, hidden, batch_first=True)
        self.output = nn.Linear(hidden, characters)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Nats per character, over sequences of shape (batch, length + 1)."""
        states, _ = self.lstm(self.embedding(batch[:, :-1]))
        return functional.cross_entropy(self.output(states).flatten(0, 1), batch[:, 1:].flatten())


def load_sequences(length: int) -> tuple[torch.Tensor, int]:
    """int64, shape (sequences, length + 1), and how many different characters there are."""
    text = "\n".join(topics[name] for name in sorted(topics))
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text]).unfold(0, length + 1, length), len(numbers)


class Training:
    """One model for all ranks, with Adam; every step takes a batch for each rank."""

    def __init__(self, arguments: argparse.Namespace, ranks: int) -> None:
        torch.manual_seed(arguments.seed)
        self._sequences, characters = load_sequences(arguments.sequence)
        self.model = CharacterModel(characters, arguments.hidden)
        self.n = sum(parameter.numel() for parameter in self.model.parameters())
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=arguments.lr)
        self._generator = torch.Generator().manual_seed(arguments.seed)
        self._ranks, self._batch = ranks, arguments.batch_size
        self.losses: list[float] = []

    def gradients(self) -> Gradients:
        """Every rank's, one after the other."""
        chosen = torch.randint(len(self._sequences), (self._ranks, self._batch), generator=self._generator)
        found, losses = [], []
        for rows in chosen:
            self.model.zero_grad()
            loss = self.model.loss(self._sequences[rows])
            loss.backward()
            losses.append(loss.item())
            parts = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
            found.append(torch.cat(parts).numpy())
        self.losses.append(float(np.mean(losses)))
        return found

    def apply(self, update: SparseVector) -> None:
        """The mean over ranks becomes the gradient of the optimizer's step."""
        dense = np.zeros(self.n, np.float32)
        dense[update.indices] = update.values / self._ranks
        flat = torch.from_numpy(dense)
        parameters = list(self.model.parameters())
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        self._optimizer.step()


@dataclass(frozen=True)
class Outcome:
    """One rank's step. selection: its local top-k."""

    selection: SparseVector
    update: SparseVector
    report: StepReport


class Ranks:
    """An algorithm and an accumulator on each rank, which reduce as threads."""

    def __init__(self, options: Scheme, size: int, n: int) -> None:
        self.k = options.k_of(n)
        self.accumulators = [NumpyAccumulator(n) for _ in range(size)]
        self.algorithms = [options.build("benchmark: figures") for _ in range(size)]

    def accumulated(self, gradients: Gradients) -> Gradients:
        """acc of every rank, before the step."""
        pairs = zip(self.accumulators, gradients, strict=True)
        return [accumulator.residual + gradient for accumulator, gradient in pairs]

    def reduce(self, gradients: Gradients) -> list[Outcome]:
        """One step, by rank."""
        def program(inner: LocalTransport) -> Outcome:
            accumulator, transport = self.accumulators[inner.rank], CountingTransport(inner)
            finite = accumulator.accumulate([(0, gradients[inner.rank])])
            result = self.algorithms[inner.rank].reduce(accumulator, self.k, finite, transport)
            assert result.update is not None
            passing = accumulator.select(result.report.local_threshold, accumulator.n)
            assert passing is not None
            accumulator.commit(result.contributed)
            return Outcome(top_k(passing, self.k), result.update, result.report)

        return run_ranks(len(self.accumulators), program, timeout=120.0)


class PlainReuse:
    """The paper's selection: local and global thresholds are evaluated every τ′ steps, and reused unguarded.

    own_residual: it keeps residuals as if it had made the updates; otherwise it selects from the acc it is given.
    """

    def __init__(self, size: int, n: int, k: int, own_residual: bool) -> None:
        self._k = k
        self._residuals = [np.zeros(n, np.float32) for _ in range(size)] if own_residual else None
        self._local = [0.0] * size
        self._global = 0.0

    def step(self, t: int, accumulated: Gradients, gradients: Gradients) -> tuple[float, int]:
        """Elements selected: locally (mean over ranks), and globally. t counts from 1."""
        due = (t - 1) % THRESHOLD_INTERVAL == 0
        if self._residuals is not None:
            accumulated = [r + gradient for r, gradient in zip(self._residuals, gradients, strict=True)]
        if due:
            self._local = [kth_magnitude(acc, self._k) for acc in accumulated]
        selections = [passing(acc, threshold) for acc, threshold in zip(accumulated, self._local, strict=True)]
        total = sum_of(selections)
        if due:
            self._global = kth_magnitude(total.values, self._k)
        update = total.compress(np.abs(total.values) >= np.float32(self._global))
        if self._residuals is not None:
            for acc, selection in zip(accumulated, selections, strict=True):
                acc[selection.indices[selection.positions_in(update)]] = 0
            self._residuals = accumulated
        return float(np.mean([len(selection) for selection in selections])), len(update)


def passing(acc: NDArray[np.float32], threshold: float) -> SparseVector:
    indices = np.flatnonzero(np.abs(acc) >= np.float32(threshold))
    return SparseVector(indices, acc[indices])


def dense_top_k(vector: NDArray[np.float32], k: int) -> SparseVector:
    return top_k(passing(vector, kth_magnitude(vector, k)), k)


class Splits:
    """How even naive and the paper's ways to cut regions are, where rank i owns region i; and what OkTopk did."""

    def __init__(self, n: int, size: int) -> None:
        self._n, self._size = n, size
        self._equal = equal_regions(n, size)
        self._averaged = self._as_often = self._equal

    def step(self, t: int, outcomes: Sequence[Outcome], k: int) -> dict[str, float]:
        """The most words that a rank receives in split-and-reduce, over 2k(P-1)/P."""
        selections = [outcome.selection for outcome in outcomes]
        repartitioned = outcomes[0].report.repartitioned
        if (t - 1) % REGION_INTERVAL == 0:
            self._averaged = averaged_cuts(selections, self._n)
        if repartitioned:
            self._as_often = averaged_cuts(selections, self._n)
        received = {"equal split": largest_received(selections, self._equal),
                    "averaged cuts (paper)": largest_received(selections, self._averaged),
                    "averaged cuts, whenever OkTopk cuts": largest_received(selections, self._as_often),
                    "OkTopk": max(o.report.phases["split_and_reduce"].bytes_received for o in outcomes) / WORD}
        ideal = 2 * k * (self._size - 1) / self._size
        return {"OkTopk cuts": float(repartitioned), **{name: words / ideal for name, words in received.items()}}


def averaged_cuts(selections: Sequence[SparseVector], n: int) -> NDArray[np.int64]:
    """Every rank cuts its own top-k evenly, and the ranks take the mean of their cuts (Section 3.1.1)."""
    size = len(selections)
    own = [s.indices[np.arange(1, size) * len(s) // size] for s in selections]
    return np.concatenate([[0], np.mean(own, axis=0).astype(np.int64), [n]])


def region_counts(selections: Sequence[SparseVector], boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64, shape (P, P): elements of rank i in region j."""
    return np.array([np.diff(np.searchsorted(s.indices, boundaries)) for s in selections])


def largest_received(selections: Sequence[SparseVector], boundaries: NDArray[np.int64]) -> float:
    """Words, where rank i owns region i."""
    counts = region_counts(selections, boundaries)
    return 2.0 * float((counts.sum(axis=0) - np.diagonal(counts)).max())


def gather_figures(outcomes: Sequence[Outcome], boundaries: NDArray[np.int64], k: int) -> dict[str, float]:
    """A direct allgatherv, one after balancing, and what OkTopk did.

    largest/mean: of the blocks before balancing. path: words that pass one link of a ring, P-1 times the largest
    block, and before it the largest move, over 2k(P-1)/P. sent: words of the rank that sends most, over the same.
    """
    size, update = len(outcomes), outcomes[0].update
    sizes = np.diff(np.searchsorted(update.indices, boundaries))
    rotation = owner_rotation(region_counts([outcome.selection for outcome in outcomes], boundaries))
    order = (np.arange(size) + rotation) % size
    plan = plan_balance(sizes)
    moves, after = plan.moves, np.diff(plan.after)
    leaving, arriving = sizes - np.diagonal(moves), moves.sum(axis=0) - np.diagonal(moves)
    path = {"direct": (size - 1) * sizes.max(),
            "always balanced": max(leaving.max(), arriving.max()) + (size - 1) * after.max()}
    sent = {"direct": ring_elements(sizes, order).max(),
            "always balanced": (leaving + ring_elements(after, order)).max()}
    balanced = outcomes[0].report.balanced
    path["OkTopk"] = path["always balanced" if balanced else "direct"]
    figures = {f"path: {name}": 2 * float(value) for name, value in path.items()}
    figures |= {f"sent: {name}": 2 * float(value) for name, value in sent.items()}
    figures["sent: OkTopk"] = max(gathered_bytes(outcome.report) for outcome in outcomes) / WORD
    ideal = 2 * k * (size - 1) / size
    return {"largest/mean": float(sizes.max() / sizes.mean()), "balanced": float(balanced),
            **{name: words / ideal for name, words in figures.items()}}


def gathered_bytes(report: StepReport) -> int:
    return sum(report.phases[name].bytes_sent for name in ("balance", "allgatherv") if name in report.phases)


def xi(accumulated: Gradients, gradients: Gradients, outcomes: Sequence[Outcome], k: int) -> dict[str, float]:
    """The least ξ with which Equation 5 holds in this step; the factors 1/P and the learning rate cancel.

    exact: with exact top-k throughout, as the equation is written. applied: with the update that was applied.
    """
    wanted = dense_top_k(np.sum(accumulated, axis=0), k)
    exact = top_k(sum_of([outcome.selection for outcome in outcomes]), k)
    norm = float(np.linalg.norm(np.sum(gradients, axis=0)))
    return {"exact": distance(wanted, exact, len(gradients[0])) / norm,
            "applied": distance(wanted, outcomes[0].update, len(gradients[0])) / norm}


def distance(one: SparseVector, other: SparseVector, n: int) -> float:
    difference = np.zeros(n, np.float32)
    difference[one.indices] = one.values
    difference[other.indices] -= other.values
    return float(np.linalg.norm(difference))


def append(series: Series, figures: dict[str, float], prefix: str = "") -> None:
    for name, value in figures.items():
        series.setdefault(prefix + name, []).append(value)


def fill_in(selections: Sequence[SparseVector], k: int) -> dict[str, float]:
    """Elements of the sum over the first 1, 2, 4, ... ranks, over k."""
    counts = [1 << i for i in range(len(selections).bit_length())]
    return {str(count): len(sum_of(selections[:count])) / k for count in counts}


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


def selected(accumulated: Gradients, outcomes: Sequence[Outcome], density: float) -> dict[str, float]:
    """Elements that are selected: by OkTopk, and locally by Gaussiank's first estimate from the same acc."""
    local = [outcome.report.local_selected for outcome in outcomes]
    estimates = [gaussian_threshold(float(acc.mean(dtype=np.float64)), float(acc.std(dtype=np.float64)), density)
                 for acc in accumulated]
    gaussian = [np.count_nonzero(np.abs(acc) >= threshold)
                for acc, threshold in zip(accumulated, estimates, strict=True)]
    return {"local: OkTopk, least": min(local), "local: OkTopk, most": max(local),
            "local: Gaussiank": float(np.mean(gaussian)), "global: OkTopk": outcomes[0].report.global_selected}


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


def skewed_gradient(case: str, n: int, rank: int, size: int, random: np.random.Generator) -> NDArray[np.float32]:
    """Weak noise, and k large elements in few places."""
    k = round(SKEWED_DENSITY * n)
    gradient = 0.01 * random.standard_normal(n, dtype=np.float32)
    if case == "three common clusters":
        indices = np.concatenate([place + random.choice(k, k // 3, replace=False)
                                  for place in (n // 10, n // 4, n // 2)])
    elif case == "a cluster for each rank":
        place = int(np.random.default_rng(size).permutation(size)[rank])  # in the lower half, and in no order
        indices = place * (n // size // 2) + random.choice(2 * k, k, replace=False)
    else:
        indices = random.choice(n, k, replace=False)
        hot = n // 3 + rank + size * np.arange(k // size)  # k elements that no two ranks share
        gradient[hot] = 5.0
    gradient[indices] += 1 + random.random(len(indices), dtype=np.float32)
    return gradient


SKEWED = ("three common clusters", "a cluster for each rank", "large values in one place")


def measure_skewed(arguments: argparse.Namespace, advance: Callable[[], object]) -> dict[str, Series]:
    """Figure 7 where the ranks' top-k crowd, by case."""
    found, n = {}, arguments.skewed_parameters
    for number, case in enumerate(SKEWED):
        ranks = Ranks(OkTopk(density=SKEWED_DENSITY), arguments.ranks, n)
        randoms = [np.random.default_rng([arguments.seed, number, rank]) for rank in range(arguments.ranks)]
        splits = Splits(n, arguments.ranks)
        series: Series = {}
        for t in range(1, SKEWED_STEPS + 1):
            outcomes = ranks.reduce([skewed_gradient(case, n, rank, arguments.ranks, random)
                                     for rank, random in enumerate(randoms)])
            append(series, splits.step(t, outcomes, ranks.k), "split: ")
            append(series, gather_figures(outcomes, ranks.algorithms[0].boundaries, ranks.k), "gather: ")
            advance()
        found[case] = series
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    total = len(arguments.densities) * arguments.steps + arguments.fill_steps + len(SKEWED) * SKEWED_STEPS
    with tqdm(total=total, unit="step") as progress:
        trainings = {}
        for density in arguments.densities:
            progress.set_description(f"density {density:g}")
            trainings[f"{density:g}"] = train(arguments, density, progress.update)
        progress.set_description("TopkDSA")
        fill = train_topkdsa(arguments, progress.update)
        progress.set_description("skewed")
        skewed = measure_skewed(arguments, progress.update)
    return {"arguments": {name: str(value) for name, value in vars(arguments).items()}, "ranks": arguments.ranks,
            "training": trainings, "fill_in": fill, "skewed": skewed}


def later(values: Sequence[float]) -> float:
    """The mean of the second half."""
    return float(np.mean(values[len(values) // 2:]))


def deviation(values: Sequence[float], k: int) -> float:
    """The mean distance from k, as a share of k."""
    return float(np.mean(np.abs(np.array(values) / k - 1)))


def show(results: dict[str, Any], console: Console) -> None:
    for density, training in results["training"].items():
        series, k = training["series"], training["k"]
        losses = training["losses"]
        table = Table(title=f"Training: {results['ranks']} ranks, n = {training['n']:,}, density {density}, "
                            f"k = {k:,}; loss {losses[0]:.2f} to {losses[-1]:.2f}")
        table.add_column("", no_wrap=True)
        for heading in ("first", "least", "mean", "most", "second half", "mean deviation from k"):
            table.add_column(heading, justify="right")
        for name, values in series.items():
            counted = name.startswith(("local", "global"))
            shown = [values[0], min(values), float(np.mean(values)), max(values), later(values)]
            table.add_row(name, *(f"{value:,.0f}" if counted else f"{value:.2f}" for value in shown),
                          f"{deviation(values, k):.1%}" if counted else "")
        console.print(table)
    show_skewed(results["skewed"], console)
    fill = results["fill_in"]
    means = ", ".join(f"{count} ranks {later(values):.2f}" for count, values in fill["series"].items())
    console.print(f"Fill-in of TopkDSA, elements of the sum over k, density {fill['density']:g}, mean of the second "
                  f"half: {means}")


def show_skewed(skewed: dict[str, Series], console: Console) -> None:
    table = Table(title="Skewed gradients: means of the steps, over the ideal")
    table.add_column("", no_wrap=True)
    for case in skewed:
        table.add_column(case, justify="right")
    for name in next(iter(skewed.values())):
        table.add_row(name, *(f"{np.mean(series[name]):.2f}" for series in skewed.values()))
    console.print(table)


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, panels = pyplot.subplots(3, 2, figsize=(12, 12.5), layout="constrained")
    first_density, first = next(iter(results["training"].items()))
    plot_xi(results, panels[0, 0])
    plot_fill_in(results, panels[0, 1])
    plot_selected(first, "local", panels[1, 0])
    plot_selected(first, "global", panels[1, 1])
    cases = {f"training,\ndensity {density}": training["series"] for density, training in results["training"].items()}
    cases |= {case.replace(" clusters", "\nclusters").replace(" for", "\nfor").replace(" in", "\nin"): series
              for case, series in results["skewed"].items()}
    plot_bars(cases, "split: ", SPLITS, panels[2, 0])
    plot_bars(cases, "gather: path: ", GATHERS, panels[2, 1])
    panels[2, 0].set_title("Split and reduce: words that the most loaded rank receives")
    panels[2, 1].set_title("Balance and allgatherv: words that pass one link of a ring")
    for axes in panels.ravel():
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    figure.suptitle(f"A character LSTM, n = {first['n']:,}, {results['ranks']} ranks; middle row: density "
                    f"{first_density}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def plot_xi(results: dict[str, Any], axes: Any) -> None:
    for (density, training), color in zip(results["training"].items(), ("#4c72b0", "#dd8452", "#55a868"),
                                          strict=False):
        values = training["series"]["xi: exact"]
        axes.plot(range(1, len(values) + 1), values, color=color, label=f"density {density}")
    axes.axhline(results["ranks"], color="#999999", linestyle="--", label="P")
    axes.set(title="ξ of Assumption 1", xlabel="step", ylim=(0, None))


def plot_fill_in(results: dict[str, Any], axes: Any) -> None:
    lines = {f"OkTopk's selections, density {density}": {
        name.removeprefix("fill-in: "): values for name, values in training["series"].items()
        if name.startswith("fill-in: ")} for density, training in results["training"].items()}
    lines[f"TopkDSA, density {results['fill_in']['density']:g}"] = results["fill_in"]["series"]
    for (name, series), marker in zip(lines.items(), "osd^v", strict=False):
        axes.plot([int(count) for count in series], [later(values) for values in series.values()], marker=marker,
                  label=name)
    ends = [int(count) for count in results["fill_in"]["series"]]
    axes.plot(ends, ends, color="#999999", linestyle="--", label="all different")
    axes.set(title="Fill-in: elements of the sum / k (second half)", xlabel="ranks", xscale="log", yscale="log")
    axes.set_xticks(ends, ends)
    axes.set_yticks(ends, ends)
    axes.minorticks_off()


def plot_selected(training: dict[str, Any], side: str, axes: Any) -> None:
    series, k = training["series"], training["k"]
    ours = "OkTopk, most" if side == "local" else "OkTopk"
    lines = [("threshold reused (paper), on the same acc", "reuse", "#dd8452"),
             ("threshold reused (paper), residual of its own", "reuse, own residual", "#c44e52"),
             ("Gaussiank's estimate", "Gaussiank", "#55a868"), ("OkTopk", ours, "#4c72b0")]
    axes.axhline(k, color="black", linewidth=1, linestyle="--", label=f"k = {k:,}")
    for label, name, color in lines:
        values = series.get(f"{side}: {name}", [])
        if values:
            axes.plot(range(1, len(values) + 1), np.maximum(values, 1), color=color, label=label)
    axes.set(title=f"Elements selected: {side} top-k", xlabel="step", yscale="log")


def plot_bars(cases: dict[str, Series], prefix: str, names: dict[str, str], axes: Any) -> None:
    width = 0.8 / len(names)
    for number, (name, color) in enumerate(names.items()):
        values = [float(np.mean(series[prefix + name])) for series in cases.values()]
        places = np.arange(len(cases)) + (number - 1) * width
        axes.bar(places, values, width, color=color, label=name)
        for place, value in zip(places, values, strict=True):
            axes.annotate(f"{value:.1f}", (place, value), ha="center", va="bottom", fontsize=8)
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    axes.margins(y=0.3)  # room for the legend
    axes.set_xticks(range(len(cases)), cases, fontsize=9)
    axes.set_ylabel("over 2k(P−1)/P (mean of the steps)")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--json", type=Path, default=Path("runs/figures.json"))
    parser.add_argument("--plot", type=Path, default=Path("runs/figures.png"))
    return parser.parse_args()


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


def main() -> None:
    arguments = parse_arguments()
    check(arguments)
    torch.set_num_threads(1)
    results = measure(arguments)
    console = Console()
    show(results, console if console.is_terminal else Console(width=120))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=1))
    try:
        plot(results, arguments.plot)
    except ImportError:
        print("No plot: matplotlib is not installed.")


if __name__ == "__main__":
    main()

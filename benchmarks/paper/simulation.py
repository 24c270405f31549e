"""What the schemes send, and how long that would take, on 2 to 256 ranks: their own code on simulated ranks.

    python -m benchmarks.paper.simulation --latency 50us --bandwidth 1gbit --json runs/simulation.json

Ranks are threads that compute one after the other. A rank holds no n elements, but the 2k largest of its acc;
which of them others have too follows a power law (--tail), made to resemble the fill-in of a real training.
Everything else is the package's code. Messages and bytes are counted; seconds are computed from them:

    phase = α · messages + bytes / bandwidth,    step = sum over its phases

with, in each phase, the most messages and the most bytes that any rank sends or receives. Messages of
collectives are taken as those of a tree: ⌈log2 P⌉ for an allgather and twice that for an allreduce; bytes as
counted. It is communication only: nothing is computed, and no two phases overlap.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from horovod_oktopk import GTopk, OkTopk, TopkA, TopkDSA
from horovod_oktopk.advise import WORD, Network, parse_bandwidth, parse_latency, predict
from horovod_oktopk.errors import OptionError
from horovod_oktopk.schemes.cost import oktopk_bound
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.transport.base import Bytes, Counts
from horovod_oktopk.transport.counting import CountingTransport, Traffic
from horovod_oktopk.transport.local import LocalTransport, run_ranks
from horovod_oktopk.vectors.sparse import Indices, SparseVector, Values

T = TypeVar("T")
SCHEMES = {"OkTopk": OkTopk, "GTopk": GTopk, "TopkDSA": TopkDSA, "TopkA": TopkA}
LARGEST = {"OkTopk": 256, "GTopk": 256, "TopkDSA": 64, "TopkA": 64}
"""More ranks than these are left out, for the time and memory that the sums of all ranks' elements take."""
COLLECTIVE = ("agree", "global_select", "allgatherv")
"""Phases in which all messages are those of collectives."""
COLORS = {"OkTopk": "#dd8452", "GTopk": "#4c72b0", "TopkDSA": "#55a868", "TopkA": "#c44e52", "dense": "#777777"}
MEASURED_KEYS = ("scheme", "ranks", "seconds", "n", "density", "rate")


class TopAccumulator:
    """An Accumulator of which only the largest elements are known; the others count as zero.

    Every step brings its own elements, so there is no residual to keep.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.dtype = np.dtype(np.float32)
        self.expected = np.inf
        self._held = SparseVector.empty(self.dtype)

    def accumulate(self, pieces: Iterable[tuple[int, SparseVector]], scale: float = 1.0,  # noqa: ARG002
                   clear: bool = False) -> bool:  # noqa: ARG002
        """acc becomes the one piece, which starts at 0."""
        ((_, self._held),) = pieces
        return bool(np.isfinite(self._held.values).all())

    def expect(self, threshold: float, limit: int) -> None:  # noqa: ARG002
        self.expected = threshold

    def select(self, threshold: float, limit: int) -> SparseVector | None:
        found = self._held.compress(np.abs(self._held.values) >= np.float32(threshold))
        return found if len(found) <= limit else None

    def sample(self, stride: int) -> Values:
        magnitudes = np.zeros(-(-self.n // stride), self.dtype)
        hit = self._held.compress(self._held.indices % stride == 0)
        magnitudes[hit.indices // stride] = np.abs(hit.values)
        return magnitudes

    def moments(self) -> tuple[float, float]:
        raise NotImplementedError("the other elements are not known")

    def commit(self, contributed: Indices) -> None:
        """Nothing is kept."""

    def read_residual(self) -> Values:
        raise NotImplementedError("nothing is kept")

    def load_residual(self, values: Values) -> None:
        raise NotImplementedError("nothing is kept")


@dataclass(frozen=True)
class Gradients:
    """What the ranks hold. Element x in the order of popularity is in a rank's top-k with probability ~ x^-tail."""

    n: int
    k: int
    tail: float
    seed: int

    @cached_property
    def order(self) -> NDArray[np.int32]:
        """The index of every x. 16 layers have shares of the popular elements that differ up to sixteenfold."""
        random = np.random.default_rng(self.seed)
        layers = np.repeat(np.geomspace(0.25, 4, 16), -(-self.n // 16))[:self.n]
        return np.argsort(random.exponential(layers)).astype(np.int32)

    @cached_property
    def octaves(self) -> list[tuple[int, int, int]]:
        """(start, stop, how many a rank selects) of ranges of x that double in length; k are selected in all."""
        low, high = 1.0, float(self.k)
        for _ in range(60):  # the first range is selected whole; it is as long as gives k in all
            middle = (low + high) / 2
            low, high = (middle, high) if sum(c for *_, c in self._octaves(middle)) < self.k else (low, middle)
        found = [(start, stop, int(count)) for start, stop, count in self._octaves(high)]
        for number in range(len(found) - 1, -1, -1):  # what rounding left
            start, stop, count = found[number]
            more = min(stop - start - count, self.k - sum(c for *_, c in found))
            found[number] = (start, stop, count + more)
        return found

    def _octaves(self, first: float) -> list[tuple[int, int, float]]:
        found, start, stop, share = [], 0, max(1, round(first)), 1.0
        while start < self.n:
            found.append((start, stop, share * (stop - start)))
            start, stop, share = stop, min(2 * stop, self.n), share / 2**self.tail
        return found

    def draw(self, rank: int, step: int) -> SparseVector:
        """A rank's 2k largest elements: k by popularity, above 1, and others anywhere below."""
        random = np.random.default_rng([self.seed, rank, step])
        chosen = np.concatenate([start + random.choice(stop - start, count, replace=False, shuffle=False)
                                 for start, stop, count in self.octaves])
        selected = self.order[chosen].astype(np.int64)
        spare = np.setdiff1d(random.integers(self.n, size=min(self.k, self.n - self.k)), selected)
        signs = np.where(chosen % 2, 1.0, -1.0)  # the ranks agree
        values = np.concatenate([signs * (1.001 + random.exponential(0.3, len(selected))),
                                 random.uniform(0.5, 1.0, len(spare))]).astype(np.float32)
        indices = np.concatenate([selected, spare])
        ascending = np.argsort(indices)
        return SparseVector(indices[ascending], values[ascending])


class TakeTurns:
    """A transport around a LocalTransport, with which one rank computes at a time: temporaries of one, not of P."""

    def __init__(self, inner: LocalTransport, turn: threading.Lock) -> None:
        self.rank, self.size = inner.rank, inner.size
        self._inner, self._turn = inner, turn

    def allgather(self, row: Counts) -> Counts:
        return self._wait(lambda: self._inner.allgather(row))

    def allreduce(self, counts: Counts) -> Counts:
        return self._wait(lambda: self._inner.allreduce(counts))

    def exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, int],
                 messages_in_flight: int) -> Iterator[list[tuple[int, Bytes]]]:
        yield from self._wait(lambda: list(self._inner.exchange(outgoing, incoming, messages_in_flight)))

    def allgatherv(self, message: Bytes, sizes: Counts) -> list[Bytes]:
        return self._wait(lambda: self._inner.allgatherv(message, sizes))

    def _wait(self, call: Callable[[], T]) -> T:
        self._turn.release()
        try:
            return call()
        finally:
            self._turn.acquire()


def simulate(scheme: str, size: int, gradients: Gradients, steps: int, advance: Callable[[], object],
             ) -> list[list[StepReport]]:
    """Reports by step and rank."""
    options = SCHEMES[scheme](k=gradients.k)
    turn = threading.Lock()

    def program(inner: LocalTransport) -> list[StepReport]:
        reports = []
        with turn:
            transport = CountingTransport(TakeTurns(inner, turn))
            accumulator, algorithm = TopAccumulator(gradients.n), options.build("benchmark: simulation")
            for step in range(steps):
                transport.reset()
                finite = accumulator.accumulate([(0, gradients.draw(inner.rank, step))])
                reports.append(algorithm.reduce(accumulator, gradients.k, finite, transport).report)
                advance()
        return reports

    return [list(reports) for reports in zip(*run_ranks(size, program, timeout=600.0), strict=True)]


@dataclass(frozen=True)
class Result:
    """One step of one scheme. Words: sent by the rank that sends most, and by the mean rank."""

    scheme: str
    ranks: int
    step: int
    selected: int
    """Elements of the update."""
    payload_most: float
    payload_mean: float
    control_most: float
    control_mean: float
    seconds: float
    """Predicted, with trees for the messages of collectives."""
    seconds_ring: float
    """The same with rings: P - 1 messages for an allgather."""
    phases: dict[str, dict[str, float]]
    """What `seconds` adds up: messages, bytes and seconds."""


def result_of(scheme: str, step: int, reports: list[StepReport], network: Network) -> Result:
    payload = np.array([report.payload_bytes()[0] for report in reports]) / WORD
    control = np.array([report.bytes_sent for report in reports]) / WORD - payload
    phases = {name: slowest([report.phases[name] for report in reports], name, network)
              for name in reports[0].phases}
    ring = sum(figures["counted_messages"] * network.latency + figures["bytes"] * 8 / network.bandwidth
               for figures in phases.values())
    return Result(scheme, len(reports), step, reports[0].global_selected, float(payload.max()), float(payload.mean()),
                  float(control.max()), float(control.mean()),
                  sum(figures["seconds"] for figures in phases.values()), ring, phases)


def slowest(traffic: list[Traffic], phase: str, network: Network) -> dict[str, float]:
    """The most messages and the most bytes of any rank, and the seconds of both."""
    size = len(traffic)
    counted = max(max(t.messages_sent, t.messages_received) for t in traffic)
    messages = counted / (size - 1) * np.ceil(np.log2(size)) if phase in COLLECTIVE else counted
    moved = max(max(t.bytes_sent, t.bytes_received) for t in traffic)
    return {"messages": float(messages), "counted_messages": counted, "bytes": moved,
            "seconds": float(messages * network.latency + moved * 8 / network.bandwidth)}


def measure(arguments: argparse.Namespace, gradients: Gradients, network: Network) -> list[Result]:
    jobs = [(scheme, size) for scheme in arguments.schemes for size in arguments.ranks if size <= LARGEST[scheme]]
    total = sum(size * steps_of(scheme) for scheme, size in jobs)
    found = []
    with tqdm(total=total, unit="rank") as progress:
        for scheme, size in jobs:
            progress.set_description(f"{scheme}, {size} ranks")
            reports = simulate(scheme, size, gradients, steps_of(scheme), progress.update)
            found += [result_of(scheme, step + 1, of_step, network) for step, of_step in enumerate(reports)]
    return found


def steps_of(scheme: str) -> int:
    """OkTopk cuts regions in the first step, and not in the second."""
    return 2 if scheme == "OkTopk" else 1


def ordinary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last step of each."""
    return [r for r in results if r["step"] == steps_of(r["scheme"])]


def show(outcome: dict[str, Any], console: Console) -> None:
    k = outcome["k"]
    table = Table(title=f"Sent in a step, n = {outcome['n']:,}, k = {k:,}; words over k; {outcome['latency']}, "
                        f"{outcome['bandwidth']}")
    table.add_column("scheme", no_wrap=True)
    for heading in ("ranks", "step", "payload, most", "payload, mean", "6(P-1)/P", "control", "update",
                    "predicted ms", "dense, ms"):
        table.add_column(heading, justify="right")
    dense = {entry["ranks"]: entry["seconds"] for entry in outcome["table1"] if entry["scheme"] == "dense"}
    for r in outcome["results"]:
        bound = f"{oktopk_bound(k, r['ranks']) / k:.3f}" if r["scheme"] == "OkTopk" else ""
        table.add_row(r["scheme"], str(r["ranks"]), str(r["step"]), f"{r['payload_most'] / k:.3f}",
                      f"{r['payload_mean'] / k:.3f}", bound, f"{r['control_most'] / k:.3f}",
                      f"{r['selected'] / k:.3f}", f"{1e3 * r['seconds']:.1f}", f"{1e3 * dense[r['ranks']]:.0f}")
    console.print(table)
    console.print("Step 1 of OkTopk cuts the regions; the later one does not. Predicted: communication only.")
    for text in outcome["left_out"]:
        console.print(f"Left out: {text}")


def plot(outcome: dict[str, Any], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, panels = pyplot.subplots(1, 3, figsize=(16, 6), layout="constrained")
    plot_payload(outcome, panels[0])
    plot_control(outcome, panels[1])
    plot_seconds(outcome, panels[2])
    ranks = sorted({r["ranks"] for r in outcome["results"]} | {m["ranks"] for m in outcome["measured"]})
    shown = [size for size in ranks if size & (size - 1) == 0] or ranks
    for axes in panels:
        axes.set(xlabel="ranks", xscale="log", yscale="log")
        axes.set_xticks(shown, shown)
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.suptitle(f"Simulated ranks, n = {outcome['n']:,}, k = {outcome['k']:,}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def by_scheme(results: list[dict[str, Any]], key: str, factor: float) -> dict[str, tuple[list[int], list[float]]]:
    """Ranks and values of each scheme, in the order of the ranks."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for r in sorted(results, key=lambda r: r["ranks"]):
        sizes, values = found.setdefault(r["scheme"], ([], []))
        sizes.append(r["ranks"])
        values.append(r[key] * factor)
    return found


def plot_payload(outcome: dict[str, Any], axes: Any) -> None:
    k = outcome["k"]
    for scheme, (sizes, values) in by_scheme(ordinary(outcome["results"]), "payload_most", 1 / k).items():
        axes.plot(sizes, values, marker="o", markersize=4, color=COLORS[scheme], label=scheme)
    sizes, words = by_scheme(outcome["table1"], "words", 1 / k)["dense"]
    axes.plot(sizes, words, color=COLORS["dense"], label="dense, 2n(P−1)/P")
    axes.plot(sizes, [oktopk_bound(k, size) / k for size in sizes], "k--", linewidth=1, label="6k(P−1)/P")
    axes.set(title="Payload words of the rank that sends most / k")


def plot_control(outcome: dict[str, Any], axes: Any) -> None:
    k = outcome["k"]
    results = [r for r in outcome["results"] if r["scheme"] == "OkTopk"]
    for label, step, key, color in (("payload", 2, "payload_mean", COLORS["OkTopk"]),
                                    ("control, ordinary step", 2, "control_mean", "#8172b3"),
                                    ("control, regions cut", 1, "control_mean", "#937860")):
        chosen = by_scheme([r for r in results if r["step"] == step], key, 1 / k)
        for sizes, values in chosen.values():
            axes.plot(sizes, values, marker="o", markersize=4, color=color, label=label)
    counted = [m for m in outcome["measured"] if m["scheme"] == "OkTopk" and m.get("bytes_sent") is not None]
    measured = by_scheme(counted, "bytes_sent", 1 / WORD / k)
    for sizes, values in measured.values():
        axes.plot(sizes, values, "k*", markersize=11, label="measured on a cluster, both together")
    axes.set(title="OkTopk: words that the mean rank sends / k")


def plot_seconds(outcome: dict[str, Any], axes: Any) -> None:
    predicted = by_scheme([*ordinary(outcome["results"]),
                           *(entry for entry in outcome["table1"] if entry["scheme"] == "dense")], "seconds", 1)
    for scheme, (sizes, values) in predicted.items():
        axes.plot(sizes, values, marker="o", markersize=4, color=COLORS[scheme],
                  label="dense (Table 1)" if scheme == "dense" else scheme)
    for scheme, (sizes, values) in by_scheme(outcome["measured"], "seconds", 1).items():
        axes.plot(sizes, values, "*", markersize=10, color=COLORS[scheme], markeredgecolor="black",
                  markeredgewidth=0.5)
    if outcome["measured"]:
        axes.plot([], [], "*", markersize=10, color="white", markeredgecolor="black",
                  label="measured on a cluster, with computation")
    axes.set(title=f"Seconds of a step, predicted: {outcome['latency']}, {outcome['bandwidth']}")


def read_measured(path: Path | None, n: int, density: float, network: Network) -> tuple[list[dict[str, Any]], int]:
    """Entries of the schemes, and of the fastest dense allreduce, for this n, density and rate; and how many are
    for others. Raises SystemExit."""
    if path is None:
        return [], 0
    try:
        content = json.loads(path.read_text())
        entries = content["results"] if isinstance(content, dict) and "results" in content else content
        if not isinstance(entries, list) or any(key not in entry for entry in entries for key in MEASURED_KEYS):
            raise ValueError(f"expected a list of entries with {', '.join(MEASURED_KEYS)}")
        same = [entry for entry in entries if entry["n"] == n and entry["density"] in (density, None)
                and parse_bandwidth(entry["rate"]) == network.bandwidth]
    except (OSError, TypeError, ValueError, OptionError) as error:
        raise SystemExit(f"simulation: cannot use --measured {path}: {error}") from None
    dense: dict[int, dict[str, Any]] = {}
    for entry in sorted((e for e in same if "dense" in e["scheme"]), key=lambda e: e["seconds"], reverse=True):
        dense[entry["ranks"]] = {**entry, "scheme": "dense", "measured_as": entry["scheme"]}
    return [e for e in same if e["scheme"] in SCHEMES] + list(dense.values()), len(entries) - len(same)


def table1(ranks: list[int], n: int, density: float, network: Network) -> list[dict[str, Any]]:
    """The predictions of `horovod_oktopk advise`, without sparsification."""
    return [{**asdict(p), "ranks": size, "seconds": p.seconds} for size in ranks
            for p in predict(n, size, density, network, 0.0)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 48, 64, 128, 256])
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--parameters", type=int, default=14_728_266, help="gradient elements (default: VGG-16)")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--tail", type=float, default=1.0,
                        help="how alike the ranks' top-k are, from 0.3 (hardly) to 4 (nearly the same)")
    parser.add_argument("--latency", default="50us", help="α")
    parser.add_argument("--bandwidth", default="1gbit", help="of one rank, in each direction")
    parser.add_argument("--measured", type=Path, help=f"JSON of a cluster: entries with {', '.join(MEASURED_KEYS)}, "
                                                      "and bytes_sent where counted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("runs/simulation.json"))
    parser.add_argument("--plot", type=Path, default=Path("runs/simulation.png"))
    return parser.parse_args()


def check(arguments: argparse.Namespace) -> Network:
    """The network. Raises SystemExit where an argument is not allowed."""
    wrong = [size for size in arguments.ranks if not 2 <= size <= 512]
    if wrong:
        raise SystemExit(f"simulation: --ranks must be from 2 to 512; got {wrong[0]}")
    if not 0 < arguments.density <= 0.25:
        raise SystemExit(f"simulation: --density must be in (0, 0.25]; got {arguments.density:g}")
    if not 1000 <= arguments.parameters < 2**31:
        raise SystemExit(f"simulation: --parameters must be from 1000 to 2^31 - 1; got {arguments.parameters}")
    if not 0.3 <= arguments.tail <= 4:
        raise SystemExit(f"simulation: --tail must be from 0.3 to 4; got {arguments.tail:g}")
    try:
        return Network(parse_latency(arguments.latency), parse_bandwidth(arguments.bandwidth))
    except OptionError as error:
        raise SystemExit(f"simulation: {error}") from None


def main() -> None:
    arguments = parse_arguments()
    network = check(arguments)
    n, density = arguments.parameters, arguments.density
    measured, others = read_measured(arguments.measured, n, density, network)
    gradients = Gradients(n, OkTopk(density=density).k_of(n), arguments.tail, arguments.seed)
    assert len(gradients.order) == n  # made before the ranks, which share it, start
    left_out = [f"{scheme} on {size} ranks" for scheme in arguments.schemes for size in arguments.ranks
                if size > LARGEST[scheme]]
    if others:
        left_out.append(f"{others} measured points, of another n, density or rate")
    outcome = {"arguments": {name: str(value) for name, value in vars(arguments).items()}, "n": n, "k": gradients.k,
               "latency": arguments.latency, "bandwidth": arguments.bandwidth,
               "results": [asdict(result) for result in measure(arguments, gradients, network)],
               "table1": table1(arguments.ranks, n, density, network), "measured": measured, "left_out": left_out}
    console = Console()
    show(outcome, console if console.is_terminal else Console(width=130))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(outcome, indent=1))
    try:
        plot(outcome, arguments.plot)
    except ImportError:
        print("No plot: matplotlib is not installed.")


if __name__ == "__main__":
    main()

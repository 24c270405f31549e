"""Traffic of the schemes, and its time, on 2 to 1,024 ranks: the package's own code on simulated ranks.

    python -m benchmarks.paper.simulation --latency 50us --bandwidth 1gbit --json runs/simulation.json

Ranks are threads that compute one after the other. A rank holds no n elements, but the 2k largest of its acc;
which of them others have too follows a power law (--tail), made to resemble the fill-in of a real training.
Everything else is the package's code. Messages and bytes are counted; seconds are computed from them:

    phase = α · rounds + o · messages + bytes / bandwidth,    step = sum over its phases

with, in each phase, the most messages and the most bytes that any rank sends or receives. o is what a message costs
the processor. Messages of collectives are taken as those of a tree, a round each: ⌈log2 P⌉ for an allgather and twice
that for an allreduce; bytes as counted. An alltoall is MPITransport's own: a message to each rank at once, or on more
than 64 ranks about 2√P messages in two rounds. Those of an exchange fly several at once, so a round is a batch of
them. It is communication only: nothing is computed, and no two phases overlap.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tqdm import tqdm

from benchmarks import output
from benchmarks.output import make_table
from benchmarks.paper.simulated_costs import Cluster, total
from benchmarks.paper.simulated_ranks import PopularElements, RankStep, simulate
from benchmarks.paper.simulation_plots import plot
from horovod_oktopk import GTopk, OkTopk, TopkA, TopkDSA
from horovod_oktopk.advise import Network, parse_bandwidth, parse_latency, predict_dense
from horovod_oktopk.errors import OptionError
from horovod_oktopk.phases.volume import oktopk_bound
from horovod_oktopk.schemes.options import Scheme
from horovod_oktopk.transport.base import WORD

SCHEMES = {"OkTopk": OkTopk, "GTopk": GTopk, "TopkDSA": TopkDSA, "TopkA": TopkA}
LARGEST = {"OkTopk": 1024, "GTopk": 256, "TopkDSA": 64, "TopkA": 64}
"""More ranks than these are left out, for the time and memory that the sums of all ranks' elements take."""
MEASURED_KEYS = ("scheme", "ranks", "seconds", "n", "density", "rate")
RANKS = [2, 4, 8, 16, 32, 48, 64, 128, 256]


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
    bound: float
    """OkTopk's, of the payload; of the others 0."""
    seconds: float
    """Predicted, with trees for the messages of collectives."""
    seconds_ring: float
    """The same with rings: P - 1 messages for an allgather, one after the other."""
    phases: dict[str, dict[str, float]]
    """Rounds, messages, bytes and seconds of each phase, which `seconds` adds up."""


def options_of(scheme: str, density: float, global_density: float | None) -> Scheme:
    if scheme == "OkTopk":
        return OkTopk(density=density, global_density=global_density)
    return SCHEMES[scheme](density=density)


def result_of(scheme: str, step: int, steps: list[RankStep], cluster: Cluster) -> Result:
    reports = [step.report for step in steps]
    payload = np.array([report.payload_bytes()[0] for report in reports]) / WORD
    control = np.array([report.bytes_sent for report in reports]) / WORD - payload
    first, phases = reports[0], cluster.of_phases(steps)
    bound = oktopk_bound(first.k, len(reports), first.global_k) if scheme == "OkTopk" else 0.0
    return Result(scheme, len(reports), step, first.global_selected, float(payload.max()), float(payload.mean()),
                  float(control.max()), float(control.mean()), bound, total(phases, "seconds"),
                  total(cluster.of_phases(steps, "ring"), "seconds"), phases)


def measure(arguments: argparse.Namespace, gradients: PopularElements, cluster: Cluster) -> list[Result]:
    jobs = [(scheme, size) for scheme in arguments.schemes for size in arguments.ranks if size <= LARGEST[scheme]]
    total = sum(size * steps_of(scheme) for scheme, size in jobs)
    found = []
    with tqdm(total=total, unit="rank") as progress:
        for scheme, size in jobs:
            progress.set_description(f"{scheme}, {size} ranks")
            options = options_of(scheme, arguments.density, arguments.global_density)
            steps = simulate(options, size, gradients, steps_of(scheme), progress.update)
            found += [result_of(scheme, step + 1, of_step, cluster) for step, of_step in enumerate(steps)]
    return found


def steps_of(scheme: str) -> int:
    """Return the number of steps: two for OkTopk, which cuts regions in the first one alone."""
    return 2 if scheme == "OkTopk" else 1


def show(outcome: dict[str, Any], console: Console) -> None:
    k = outcome["k"]
    table = make_table(
        f"Sent in a step, n = {outcome['n']:,}, k = {k:,}; words over k; {outcome['latency']}, "
        f"{outcome['bandwidth']}", ["scheme"],
        ["ranks", "step", "payload, most", "payload, mean", "bound", "control", "update", "predicted ms",
         "dense, ms"])
    dense = {entry["ranks"]: entry["seconds"] for entry in outcome["dense"]}
    for r in outcome["results"]:
        bound = f"{r['bound'] / k:.3f}" if r["bound"] else ""
        table.add_row(r["scheme"], str(r["ranks"]), str(r["step"]), f"{r['payload_most'] / k:.3f}",
                      f"{r['payload_mean'] / k:.3f}", bound, f"{r['control_most'] / k:.3f}",
                      f"{r['selected'] / k:.3f}", f"{1e3 * r['seconds']:.1f}", f"{1e3 * dense[r['ranks']]:.0f}")
    console.print(table)
    console.print("Step 1 of OkTopk cuts the regions; the later one does not. Predicted: communication only.")
    for text in outcome["left_out"]:
        console.print(f"Left out: {text}")


def read_measured(path: Path | None, n: int, density: float, network: Network) -> tuple[list[dict[str, Any]], int]:
    """Return the entries for this n, density and rate, and the number of other entries.

    They are those of the schemes, and of the fastest dense allreduce. Raise SystemExit for a file of another kind.
    """
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


def dense_of(ranks: list[int], n: int, network: Network) -> list[dict[str, Any]]:
    """Return what `horovod_oktopk advise` predicts of dense, by the number of ranks."""
    return [{**asdict(p), "ranks": size, "seconds": p.seconds} for size in ranks
            for p in [predict_dense(n, size, network)]]


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = output.make_parser(__doc__, "simulation")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks (2 to 256)")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--parameters", type=int, default=14_728_266, help="gradient elements (default: VGG-16)")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--global-density", type=float, help="share that OkTopk keeps of the sum (the density)")
    parser.add_argument("--tail", type=float, default=1.0,
                        help="how alike the ranks' top-k are, from 0.3 (hardly) to 4 (nearly the same)")
    parser.add_argument("--latency", default="50us", help="α, with its unit: 50us, 0.1ms")
    parser.add_argument("--overhead", default="2us", help="o, what a message costs the processor, with its unit")
    parser.add_argument("--bandwidth", default="1gbit", metavar="RATE",
                        help="of a rank's link, in each direction, with its unit: 10gbit, 940mbit/s (1gbit)")
    parser.add_argument("--measured", type=Path, help=f"JSON of a cluster: entries with {', '.join(MEASURED_KEYS)}, "
                                                      "and bytes_sent where counted")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(line)


def check(arguments: argparse.Namespace) -> Cluster:
    """Return the network of the arguments. Raise SystemExit for an argument that is not allowed."""
    wrong = [size for size in arguments.ranks if not 2 <= size <= 1024]
    if wrong:
        raise SystemExit(f"simulation: --ranks must be from 2 to 1024; got {wrong[0]}")
    if not 0 < arguments.density <= 0.25:
        raise SystemExit(f"simulation: --density must be in (0, 0.25]; got {arguments.density:g}")
    if not 1000 <= arguments.parameters < 2**31:
        raise SystemExit(f"simulation: --parameters must be from 1000 to 2^31 - 1; got {arguments.parameters}")
    if not 0.3 <= arguments.tail <= 4:
        raise SystemExit(f"simulation: --tail must be from 0.3 to 4; got {arguments.tail:g}")
    try:
        OkTopk(global_density=arguments.global_density)
        return Cluster(parse_latency(arguments.latency), parse_bandwidth(arguments.bandwidth),
                       parse_latency(arguments.overhead))
    except OptionError as error:
        raise SystemExit(f"simulation: {error}") from None


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    cluster = check(arguments)
    gradients = PopularElements(arguments.parameters, OkTopk(density=arguments.density).k_of(arguments.parameters),
                                arguments.tail, arguments.seed)
    assert len(gradients.order) == gradients.n  # made before the ranks, which share it, start
    left_out = [f"{scheme} on {size} ranks" for scheme in arguments.schemes for size in arguments.ranks
                if size > LARGEST[scheme]]
    measured, others = read_measured(arguments.measured, gradients.n, arguments.density, cluster)
    if others:
        left_out = [*left_out, f"{others} measured points, of another n, density or rate"]
    outcome = {"arguments": output.as_text(arguments), "n": gradients.n, "k": gradients.k,
               "latency": arguments.latency, "bandwidth": arguments.bandwidth,
               "results": [asdict(result) for result in measure(arguments, gradients, cluster)],
               "dense": dense_of(arguments.ranks, gradients.n, cluster), "measured": measured, "left_out": left_out}
    show(outcome, output.make_console())
    output.write_json(arguments.json, outcome)
    plot(outcome, arguments.plot)


if __name__ == "__main__":
    main()

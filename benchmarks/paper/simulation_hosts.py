"""simulation.py --ranks-per-host: flat, and with each host as one worker.

Ranks that follow one another are a host's. They share its link, so the bytes of all of them go over it one after
another; each rank has a core. What they send each other is copied into memory that they share and out of it, and a
round of such messages has a latency of 1 µs. With each host as one worker, its ranks first add up their n elements:
2.5 (L-1) copies of them, as measured (SUM_COPIES in simulated_costs.py). Dense is a ring in the order of
the ranks, which crosses each link once, in the rounds of a tree. Each worker, a rank or a host, selects k.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from tqdm import tqdm

from benchmarks.output import make_table
from benchmarks.paper.simulated_costs import Cluster, Figures, total
from benchmarks.paper.simulated_ranks import Job, PopularElements, RankStep, simulate
from benchmarks.paper.simulation_plots import label, last_steps
from horovod_oktopk.advise import predict_dense
from horovod_oktopk.schemes.base import Scheme
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.vectors.wire import WORD

ON_HOSTS = ("OkTopk",)
"""It looks at all of a worker's elements at once."""
HOSTS = (2, 4, 8, 16, 32)
"""If no ranks are given."""


@dataclass(frozen=True)
class HostResult:
    """One step of one scheme. Of the host whose link carries most, all of its ranks together:"""

    scheme: str
    hierarchical: bool
    ranks: int
    hosts: int
    step: int
    words: float
    """On its link, in one direction."""
    payload: float
    """Of these, indices and values."""
    messages: float
    """That leave it."""
    adding: float
    """Seconds in which its ranks add up their gradients."""
    seconds: dict[str, float]
    """Predicted, by the rate of a link: with trees for the messages of collectives, and adding up."""
    seconds_ring: dict[str, float]
    """The same with rings in the order of the ranks."""
    phases: dict[str, Figures]
    """What `seconds` adds up but for adding up; seconds at the first rate."""


def result_of(scheme: str, job: Job, step: int, steps: list[RankStep], clusters: dict[str, Cluster]) -> HostResult:
    """clusters: by the rate of a link."""
    trees = {rate: cluster.of_phases(steps) for rate, cluster in clusters.items()}
    phases, cluster = next(iter(trees.values())), next(iter(clusters.values()))
    adding = cluster.host.sum_seconds(steps[0].report.n) if job.hierarchical else 0.0
    payload = {name: phases[name] for name in StepReport.PAYLOAD if name in phases}
    return HostResult(
        scheme, job.hierarchical, job.size, job.size // job.ranks_per_host, step, total(phases, "bytes") / WORD,
        total(payload, "bytes") / WORD, total(phases, "away"), adding,
        {rate: adding + total(of_phases, "seconds") for rate, of_phases in trees.items()},
        {rate: adding + total(cluster.of_phases(steps, "ring"), "seconds") for rate, cluster in clusters.items()},
        phases)


def jobs_of(arguments: argparse.Namespace, largest: dict[str, int]) -> list[tuple[str, Job]]:
    """Every scheme flat and, where it can, with hosts as workers. largest: ranks, by scheme."""
    return [(scheme, Job(size, arguments.ranks_per_host, hierarchical)) for scheme in arguments.schemes
            for size in arguments.ranks if size <= largest[scheme]
            for hierarchical in (False, True) if not hierarchical or scheme in ON_HOSTS]


def measure(jobs: list[tuple[str, Job]], options_of: Callable[[str], Scheme], steps_of: Callable[[str], int],
            gradients: PopularElements, clusters: dict[str, Cluster]) -> list[HostResult]:
    found = []
    with tqdm(total=sum(job.size * steps_of(scheme) for scheme, job in jobs), unit="rank") as progress:
        for scheme, job in jobs:
            progress.set_description(f"{label(scheme, job.hierarchical)}, {job.size} ranks")
            steps = simulate(options_of(scheme), job, gradients, steps_of(scheme), progress.update)
            found += [result_of(scheme, job, 1 + t, of_step, clusters) for t, of_step in enumerate(steps)]
    return found


def dense_of(ranks: list[int], n: int, clusters: dict[str, Cluster]) -> list[dict[str, Any]]:
    """What `horovod_oktopk advise` predicts of dense, by the number of ranks."""
    found = []
    for size in ranks:
        of_rates = {rate: predict_dense(n, size, cluster) for rate, cluster in clusters.items()}
        words = next(iter(of_rates.values())).words
        found.append({"scheme": "dense", "ranks": size, "words": words,
                      "seconds": {rate: p.seconds for rate, p in of_rates.items()}})
    return found


def outcome_of(arguments: argparse.Namespace, gradients: PopularElements, results: list[HostResult],
               clusters: dict[str, Cluster]) -> dict[str, Any]:
    host = next(iter(clusters.values())).host
    return {"n": gradients.n, "k": gradients.k, "latency": arguments.latency, "ranks_per_host": host.ranks,
            "memory": host.memory, "results": [asdict(result) for result in results],
            "dense": dense_of(arguments.ranks, gradients.n, clusters)}


def show(outcome: dict[str, Any], console: Console) -> None:
    k, rates = outcome["k"], list(outcome["dense"][0]["seconds"])
    table = make_table(
        f"{outcome['ranks_per_host']} ranks a host; n = {outcome['n']:,}, k = {k:,}; {outcome['latency']}, memory "
        f"{outcome['memory'] / 1e9:g} GB/s", ["scheme"],
        ["ranks", "hosts", "words/k", "payload", "messages", "adding up, ms", *(f"ms, {rate}" for rate in rates)])
    for r in last_steps(outcome["results"]):
        table.add_row(label(r["scheme"], r["hierarchical"]), str(r["ranks"]), str(r["hosts"]),
                      f"{r['words'] / k:.2f}", f"{r['payload'] / k:.2f}", f"{r['messages']:.0f}",
                      f"{1e3 * r['adding']:.1f}",
                      *(f"{1e3 * r['seconds'][rate]:.1f}" for rate in rates))
    for r in outcome["dense"]:
        table.add_row("dense", str(r["ranks"]), str(r["ranks"] // outcome["ranks_per_host"]),
                      f"{r['words'] / k:.1f}", "", "", "", *(f"{1e3 * r['seconds'][rate]:.1f}" for rate in rates))
    console.print(table)
    console.print("Words and messages: on a host's link, of all its ranks. Predicted: communication, and adding up "
                  "gradients on a host.")
    for text in outcome["left_out"]:
        console.print(f"Left out: {text}")

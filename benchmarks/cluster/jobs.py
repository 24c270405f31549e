"""Allreduces on the cluster as jobs: which schemes one mpirun measures, with which of MPI's algorithms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import launch
from benchmarks.cluster.hosts import Cluster
from benchmarks.output import BLUE, GREEN, ORANGE, RED, VIOLET

SPARSE = ("OkTopk", "OkTopk, bfloat16", "OkTopk, log4", "OkTopk, reuse",
          "OkTopk, hierarchical", "OkTopk, log4, hierarchical", "GTopk", "TopkDSA", "TopkA",
          "GaussianK")
DENSE = ("Horovod dense", "MPI dense")
COLORS = {"OkTopk, hierarchical": "#8c1a00", "OkTopk, log4, hierarchical": "#4d3300",
          "OkTopk": ORANGE, "OkTopk, bfloat16": RED, "OkTopk, log4": "#937860", "OkTopk, reuse": "#ccb974",
          "GTopk": GREEN, "TopkDSA": VIOLET, "TopkA": BLUE, "GaussianK": "#64b5cd",
          "Horovod dense": "#555555", "best dense": "#aaaaaa"}
ALGORITHMS = {"ring": 4, "segmented ring": 5, "Rabenseifner": 6}
"""Open MPI's numbers of its allreduce algorithms (coll_tuned_allreduce_algorithm)."""
Result = dict[str, Any]


def options_of(algorithm: str) -> list[str]:
    """Return options of mpirun with which MPI's allreduce uses the algorithm."""
    return ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm",
            str(ALGORITHMS[algorithm])]


@dataclass(frozen=True)
class Job:
    """Schemes that one mpirun measures; algorithm: of MPI's allreduce, None for Open MPI's choice."""

    schemes: tuple[str, ...]
    algorithm: str | None = None

    def run(self, hosts: Cluster, settings: dict[str, Any], timeout: float) -> list[Result]:
        """Return one dictionary for each scheme and density. settings: the other arguments of allreduce.measure."""
        options = [] if self.algorithm is None else options_of(self.algorithm)
        found: list[Result] = launch.measured(hosts.mpirun(*options), "benchmarks.cluster.allreduce",
                                              {"schemes": self.schemes, **settings}, timeout)
        suffix = f", {self.algorithm}" if self.algorithm else ""
        return [{**result, "scheme": result["scheme"] + suffix} for result in found]


def plan_jobs(schemes: tuple[str, ...], algorithms: tuple[str, ...]) -> list[Job]:
    """Return the jobs: dense schemes run with Open MPI's choice and with each of the algorithms.

    Horovod gets jobs of its own, as its background thread takes time from the others.
    """
    apart = [Job((name,), algorithm) for name in DENSE if name in schemes for algorithm in (None, *algorithms)]
    together = tuple(name for name in SPARSE if name in schemes)
    return [*apart, Job(together)] if together else apart

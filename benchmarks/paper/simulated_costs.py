"""Seconds of simulated steps, from what crosses the links of their hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.paper.simulated_links import Way
from benchmarks.paper.simulated_ranks import RankStep
from horovod_oktopk.advise import Network
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.vectors.wire import WORD

COPIES = 2
"""Of a message on a host: into memory that both ranks share, and out of it."""
SUM_COPIES = 2.5
"""What a word costs that one rank of a host hands another to be added: so many copies of it in memory. It is written
into memory that both see, cleared where it was, read, and added. With 2, 4 and 8 ranks it was 2.5, 2.4 and 2.4."""
Figures = dict[str, float]


@dataclass(frozen=True)
class Host:
    """ranks: L, which share the host's link. memory: bytes that they copy in a second, all together."""

    ranks: int = 1
    memory: float = float("inf")

    def sum_seconds(self, n: int) -> float:
        """What it takes its ranks to add up n elements each: all but its own share goes through memory."""
        return SUM_COPIES * (self.ranks - 1) * n * WORD / self.memory


ALONE = Host()


@dataclass(frozen=True)
class Cluster(Network):
    """overhead: o, seconds of the processor for each message. host_latency: seconds for a message on a host."""

    overhead: float
    host: Host = ALONE
    host_latency: float = 1e-6

    def of_phase(self, name: str, steps: list[RankStep], way: Literal["tree", "ring"]) -> Figures:
        """Of all ranks in one phase: the most rounds and messages of any rank; of any host the most messages that
        leave it, bytes on its link in one direction, and bytes that its ranks send each other; and the seconds."""
        ways = [getattr(step.crossings[name], way) if name in step.crossings else Way() for step in steps]
        rounds, messages = max(w.rounds for w in ways), max(w.messages for w in ways)
        left, came = self.by_host([w.left for w in ways]), self.by_host([w.came for w in ways])
        inside = self.by_host([step.report.phases[name].bytes_sent for step in steps]) - left
        latency = self.host_latency if name in StepReport.ON_HOST else self.latency
        moved = float(max(left.max(), came.max()))
        seconds = (rounds * latency + messages * self.overhead + moved * 8 / self.bandwidth
                   + COPIES * float(inside.max()) / self.host.memory)
        return {"rounds": rounds, "messages": messages, "away": float(self.by_host([w.away for w in ways]).max()),
                "bytes": moved, "on_host": float(inside.max()), "seconds": seconds}

    def by_host(self, values: list[float]) -> np.ndarray:
        """Sums over the ranks of each host. values: by rank."""
        return np.reshape(values, (-1, self.host.ranks)).sum(axis=1)

    def of_phases(self, steps: list[RankStep], way: Literal["tree", "ring"] = "tree") -> dict[str, Figures]:
        """Of all phases in which something is sent."""
        names = steps[0].report.phases
        return {name: self.of_phase(name, steps, way) for name in names}


def total(phases: dict[str, Figures], key: str) -> float:
    """Of all phases."""
    return sum(figures[key] for figures in phases.values())

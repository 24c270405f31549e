"""Seconds of simulated steps, from what crosses the links of their ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.paper.simulated_links import Way
from benchmarks.paper.simulated_ranks import RankStep
from horovod_oktopk.advise import Network

Figures = dict[str, float]


@dataclass(frozen=True)
class Cluster(Network):
    """A network. overhead: o, seconds of the processor for each message."""

    overhead: float

    def of_phase(self, name: str, steps: list[RankStep], way: Literal["tree", "ring"]) -> Figures:
        """Return the figures of a phase: the most rounds, messages, bytes (one way) of any rank; and the seconds."""
        ways = [getattr(step.crossings[name], way) if name in step.crossings else Way() for step in steps]
        traffic = [step.report.phases[name] for step in steps]
        rounds, messages = max(w.rounds for w in ways), max(w.messages for w in ways)
        moved = max(max(each.bytes_sent, each.bytes_received) for each in traffic)
        seconds = rounds * self.latency + messages * self.overhead + moved * 8 / self.bandwidth
        return {"rounds": rounds, "messages": messages, "bytes": moved, "seconds": seconds}

    def of_phases(self, steps: list[RankStep], way: Literal["tree", "ring"] = "tree") -> dict[str, Figures]:
        """Return the figures of all phases in which something is sent."""
        names = steps[0].report.phases
        return {name: self.of_phase(name, steps, way) for name in names}


def total(phases: dict[str, Figures], key: str) -> float:
    """Return the sum over all phases."""
    return sum(figures[key] for figures in phases.values())

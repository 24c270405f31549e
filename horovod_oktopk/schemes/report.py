"""The report of one step, which is always kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from ..transport.counting import Phase, Traffic


@dataclass
class StepReport:
    """One rank's view of one reduction."""

    step: int
    """The step counter, from 1."""
    n: int
    k: int
    global_k: int = 0
    """Most elements of the sum that are kept; see `OkTopk(global_density=...)`."""
    finite: bool = True
    """False if some rank's gradient held NaN or Inf: then nothing was reduced and no residual changed."""
    same_rates: bool = True
    """False if the ranks have different learning rates."""
    local_selected: int = 0
    global_selected: int = 0
    local_threshold: float = 0.0
    global_threshold: float = 0.0
    repartitioned: bool = False
    balanced: bool = False
    phases: dict[str, Traffic] = field(default_factory=dict)
    """Bytes, messages and seconds, by phase."""
    rounds: int = 1
    """Number of reductions since this rank's step before; under `Partial` there may be several."""
    active: tuple[bool, ...] = ()
    """True for each rank that had come for the last round, by rank, under `Partial`. Empty if there was none."""
    staleness: tuple[int, ...] = ()
    """Number of rounds begun before the last one that a rank had not seen, by rank, under `Partial`."""
    seconds_saved: float = 0.0
    """Seconds by which rounds came sooner than if every step had waited for the slowest rank, under `Partial`."""

    gain: float = 1.0
    """Factor on the ranks' own steps, as their gradients are noisier than dense ones, with `StepAhead`."""
    noise_ratio: float = 1.0
    """Mean square of a rank's gradient, divided by that of the ranks' mean gradient, with `StepAhead`."""
    noise_scale: float = math.nan
    """Gradient noise scale (McCandlish et al., 2018), as a multiple of the ranks' whole batch, with `StepAhead`.

    NaN if not measured; infinite if there is nothing but noise.
    """

    PAYLOAD: ClassVar[tuple[Phase, ...]] = ("split_and_reduce", "balance", "allgatherv", "reduce_tree",
                                            "broadcast_tree", "allreduce")
    """Phases that move indices and values."""
    ON_HOST: ClassVar[tuple[Phase, ...]] = ("host_agree", "host_sum", "host_select", "host_gather")
    """Phases whose messages all stay on the host, if each host is one worker."""

    FIGURES: ClassVar[tuple[str, ...]] = (
        "k", "density", "global_k", "finite", "local_selected", "global_selected", "local_threshold",
        "global_threshold", "repartitioned", "balanced", "bytes_sent", "bytes_received", "seconds")
    """Names in `scalars` at every step."""

    @property
    def density(self) -> float:
        """Fraction of the elements that a rank selects; 0 where there are none, as all gradients are sparse."""
        return self.k / self.n if self.n else 0.0

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent in all phases, agreement included, except those that stay on its host."""
        return sum(traffic.bytes_sent for name, traffic in self.phases.items() if name not in self.ON_HOST)

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank received in all phases, agreement included, except those of its host."""
        return sum(traffic.bytes_received for name, traffic in self.phases.items() if name not in self.ON_HOST)

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        return sum(traffic.seconds for traffic in self.phases.values())

    def payload_bytes(self) -> tuple[int, int]:
        """Return (sent, received) bytes of indices and values, which `oktopk_bound` bounds."""
        payload: list[Traffic] = [self.phases[name] for name in self.PAYLOAD if name in self.phases]
        return sum(t.bytes_sent for t in payload), sum(t.bytes_received for t in payload)

    def scalars(self, prefix: str = "oktopk") -> dict[str, float]:
        """Return all figures by name: a plain dictionary, as Weights & Biases, MLflow and others take it.

        Every name begins with the prefix and a slash.
        """
        figures: dict[str, float] = {name: getattr(self, name) for name in self.FIGURES}
        if self.rounds != 1 or self.active:
            figures |= {"rounds": self.rounds, "active_ranks": sum(self.active), "seconds_saved": self.seconds_saved}
            figures |= {f"staleness/rank{rank}": count for rank, count in enumerate(self.staleness)}
        if not math.isnan(self.noise_scale):
            figures |= {"gain": self.gain, "noise_ratio": self.noise_ratio, "noise_scale": self.noise_scale}
        for name, traffic in self.phases.items():
            figures |= {f"{name}/{key}": value for key, value in vars(traffic).items()}
        return {f"{prefix}/{name}": float(value) for name, value in figures.items()}

"""What one step did: always kept, as it costs nothing next to the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..transport.counting import Traffic



class ScalarWriter(Protocol):
    """The one method needed of a TensorBoard SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


@dataclass
class StepReport:
    """One rank's view of one reduction."""

    step: int
    """The step counter, from 1."""
    n: int
    k: int
    finite: bool = True
    """False: some rank's gradient held NaN or Inf, so nothing was reduced and no residual changed."""
    local_selected: int = 0
    global_selected: int = 0
    local_threshold: float = 0.0
    global_threshold: float = 0.0
    way: str = "split"
    """How it was reduced: always "split", or with algorithm="auto" also "gather" or "dense"."""
    repartitioned: bool = False
    balanced: bool = False
    phases: dict[str, Traffic] = field(default_factory=dict)
    """Bytes, messages and seconds, by phase."""

    PAYLOAD = ("split_and_reduce", "balance", "allgatherv", "reduce_tree", "broadcast_tree",
               "allreduce")

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent in all phases, agreement included."""
        return sum(traffic.bytes_sent for traffic in self.phases.values())

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank received in all phases, agreement included."""
        return sum(traffic.bytes_received for traffic in self.phases.values())

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        return sum(traffic.seconds for traffic in self.phases.values())

    def payload_bytes(self) -> tuple[int, int]:
        """(sent, received) bytes of indices and values: what the 6k(P-1)/P words bound."""
        payload: list[Traffic] = [self.phases[name] for name in self.PAYLOAD if name in self.phases]
        return sum(t.bytes_sent for t in payload), sum(t.bytes_received for t in payload)

    def scalars(self) -> Mapping[str, float]:
        """All figures by name, as a logger wants them."""
        figures: dict[str, float] = {
            "k": self.k, "finite": self.finite,
            "local_selected": self.local_selected, "global_selected": self.global_selected,
            "local_threshold": self.local_threshold, "global_threshold": self.global_threshold,
            "repartitioned": self.repartitioned, "balanced": self.balanced,
            "bytes_sent": self.bytes_sent, "bytes_received": self.bytes_received, "seconds": self.seconds}
        for name, traffic in self.phases.items():
            figures |= {f"{name}/{key}": value for key, value in vars(traffic).items()}
        return figures

    def write(self, writer: ScalarWriter, prefix: str = "oktopk") -> None:
        """Writes all figures to a TensorBoard SummaryWriter (or whatever has its add_scalar)."""
        for name, value in self.scalars().items():
            writer.add_scalar(f"{prefix}/{name}", float(value), self.step)

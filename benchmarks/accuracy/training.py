"""Arguments, statistics and output of all programs that train, in either framework."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from horovod_oktopk.phases.volume import dense_volume
from horovod_oktopk.schemes.report import StepReport

WARM_UP_STEPS = 5
"""Not timed."""
Results = dict[str, Any]


def make_parser(description: str | None, schemes: Iterable[str], epochs: int, batch_size: int, lr: float,
                ) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", choices=["none", *schemes], default="oktopk")
    parser.add_argument("--density", type=float, default=0.01, help="fraction of the gradient that is sent")
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--batch-size", type=int, default=batch_size, help="per rank")
    parser.add_argument("--lr", type=float, default=lr, help="per rank: it is multiplied by the number of ranks")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="rank 0 writes the results here")
    return parser


class Statistics:
    """Seconds and bytes by step, on this rank.

    hvd: Horovod's module for the framework, or another object with `size` and `allgather_object`.
    """

    def __init__(self, hvd: Any, parameters: int) -> None:
        self._hvd, self._parameters = hvd, parameters
        self._seconds: list[float] = []
        self._bytes: list[float] = []
        self._counted = False

    def step(self, seconds: float, report: StepReport | None, is_dense: bool = True) -> None:
        """Add a step. report: of a sparse scheme.

        Without a report the bytes are computed for a dense allreduce; they are 0 if the scheme is not dense, as its
        exchange has not ended yet.
        """
        self._seconds.append(seconds)
        self._counted |= report is not None or not is_dense
        dense = 4.0 * dense_volume(self._parameters, self._hvd.size()) if is_dense else 0.0
        self._bytes.append(dense if report is None else float(report.bytes_sent))

    @property
    def bytes_sent(self) -> float:
        """By this rank, in all steps."""
        return sum(self._bytes)

    def summary(self, arguments: argparse.Namespace) -> Results:
        """Return the results of all ranks together."""
        means = self._hvd.allgather_object(statistics.fmean(self._bytes))
        return {"compression": arguments.compression, "density": arguments.density, "ranks": self._hvd.size(),
                "parameters": self._parameters, "bytes_per_step": statistics.fmean(means),
                "bytes_are": "counted as sent" if self._counted else "computed: 2n(P-1)/P words of 4 bytes",
                "seconds_per_step": statistics.median(self._seconds[WARM_UP_STEPS:])}


def finish(results: Results, reached: str, path: Path | None) -> None:
    """Print on rank 0 what was reached, and write the results where --json wants them."""
    print(f"{reached}, {results['bytes_per_step']:,.0f} bytes sent by each rank in a step, "
          f"{1e3 * results['seconds_per_step']:.1f} ms a step")
    if path is not None:
        path.write_text(json.dumps(results, indent=1))

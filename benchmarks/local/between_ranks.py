"""Seconds between ranks of a step: torch.distributed beside Horovod over Gloo and beside MPI, in turns in one job.

    python -m benchmarks.local.between_ranks --json runs/between_ranks.json --plot runs/between_ranks.png

All ranks are on this machine, without a network. Selection and the writing of updates are left out.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from rich.console import Console
from tqdm import tqdm

from benchmarks import launch, output

NAMES = {"mpi": "MPI (mpi4py)", "gloo": "Horovod over Gloo"}
"""Horovod's networks, beside each of which torch.distributed is measured in the same job."""
OURS = "torch.distributed"
TIMEOUT = 900.0


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each job and number of elements, with the seconds of each step."""
    jobs = [(network, n) for n in arguments.parameters for network in NAMES]
    return [launch.measured(launch.horovodrun(arguments.ranks, network), "benchmarks.local.between_ranks_rank",
                            {"network": network, "n": n, "density": arguments.density, "steps": arguments.steps,
                             "warm_up": arguments.warm_up}, TIMEOUT)
            for network, n in tqdm(jobs, unit="job")]


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = output.make_table("Between ranks: milliseconds of a step, median (lowest)", ["elements", "Horovod's job"],
                              ["Horovod's", "torch.distributed's", "ratio of medians"])
    for row in rows:
        theirs, ours = row["seconds"]["horovod"], row["seconds"]["distributed"]
        table.add_row(f"{row['n']:,}", NAMES[row["network"]], _cell(theirs), _cell(ours),
                      f"{statistics.median(ours) / statistics.median(theirs):.2f}")
    console.print(table)


def _cell(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ({1e3 * min(seconds):.1f})"


def main() -> None:
    launch.end_cleanly_on_sigterm()
    parser = output.make_parser(__doc__, "between_ranks")
    parser.add_argument("--parameters", type=int, nargs="+", default=[5_000_000, 15_000_000])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    arguments = parser.parse_args()
    rows = measure(arguments)
    output.write_json(arguments.json, rows)
    show(rows, output.make_console())
    series = {name: [1e3 * statistics.median(row["seconds"][key]) for row in rows]
              for name, key in (("Horovod's", "horovod"), (OURS, "distributed"))}
    output.grouped_bars(arguments.plot, f"{arguments.ranks} ranks on one machine, density {arguments.density:g}",
                        "milliseconds between ranks", [f"{NAMES[r['network']]}\n{r['n']:,}" for r in rows], series,
                        "%.0f")


if __name__ == "__main__":
    main()

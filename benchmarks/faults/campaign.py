"""Many jobs in each of which one rank goes wrong: nothing may hang, crash, or be silently wrong.

    .venv/bin/python -m benchmarks.faults.campaign --jobs 200 --seed 1
    .venv/bin/python -m benchmarks.faults.campaign --jobs 20 --programs torch --faults kill freeze

Real jobs of 2 or 3 ranks, under horovodrun and torchrun. A plan is drawn for each by the seed: program, mode,
network, fault, rank, time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from benchmarks import launch, output
from benchmarks.faults.jobs import Ended, faults_of, run
from benchmarks.faults.plans import FAULTS, NETWORKS, PROGRAMS, Plan, draw
from benchmarks.output import BLUE, GREY, ORANGE

Row = dict[str, Any]


def campaign(arguments: argparse.Namespace) -> list[Row]:
    """Return one row for each job; jobs whose plan goes on are compared with an undisturbed one."""
    plans = list(islice(draw(arguments.seed, arguments.programs, arguments.networks, arguments.faults),
                        arguments.jobs))
    undisturbed = sorted({plan.without_fault for plan in plans if plan.goes_on and plan.has_fixed_bits}, key=str)
    with ThreadPoolExecutor(arguments.parallel) as pool, tqdm(total=len(undisturbed) + len(plans), unit="job") as bar:
        def one(plan: Plan) -> Ended:
            ended = run(plan, arguments.limit)
            bar.update()
            return ended

        references = dict(zip(undisturbed, pool.map(one, undisturbed), strict=True))
        rows = [_row(ended, None) for ended in references.values()]
        for ended in pool.map(one, plans):
            rows.append(_row(ended, references.get(ended.plan.without_fault)))
            if rows[-1]["wrong"]:
                tqdm.write(f"{ended.plan}: {'; '.join(rows[-1]['wrong'])}")
            output.write_json(arguments.json, rows)
    return rows


def _row(ended: Ended, reference: Ended | None) -> Row:
    wrong = faults_of(ended, reference)
    return {**asdict(ended.plan), "seconds": ended.seconds, "wrong": wrong,
            "told": {rank: each.get("error") for rank, each in ended.ranks.items()},
            "output": ended.output[-8000:] if wrong else ""}


def show(rows: list[Row], console: Console) -> None:
    columns = [(program, network) for program in PROGRAMS for network in NETWORKS
               if any((row["program"], row["network"]) == (program, network) for row in rows)]
    table = output.make_table("Jobs that ended as promised, of all", ["one rank …"],
                              [f"{program}\n{network}" for program, network in columns])
    for fault, words in FAULTS.items():
        of_fault = [row for row in rows if row["fault"] == fault]
        if of_fault:
            table.add_row(words, *(_cell([row for row in of_fault if (row["program"], row["network"]) == column])
                                   for column in columns))
    console.print(table)
    wrong = sum(bool(row["wrong"]) for row in rows)
    console.print(f"{len(rows)} jobs, {wrong} not as promised")


def _cell(rows: list[Row]) -> str:
    return f"{sum(not row['wrong'] for row in rows)} / {len(rows)}" if rows else ""


def plot(rows: list[Row], path: Path) -> None:
    """Plot the seconds from the fault that ended a job to its end."""
    timed = [row for row in rows if row["seconds"] and row["fault"] not in ("pause", "disk", "nan")]
    faults = [fault for fault in FAULTS if any(row["fault"] == fault for row in timed)]
    pyplot = output.load_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    for network, color, shift in (("mpi", BLUE, -0.2), ("gloo", ORANGE, 0.0), ("torchrun", GREY, 0.2)):
        found = [(row["seconds"], faults.index(row["fault"]) + shift) for row in timed if row["network"] == network]
        if found:
            axes.scatter(*zip(*found, strict=True), s=16, alpha=0.6, color=color, linewidths=0,
                         label={"mpi": "MPI", "gloo": "Gloo", "torchrun": "torchrun"}[network])
    axes.set(xscale="log", xlabel="seconds from the fault to the end of the job",
             yticks=range(len(faults)), yticklabels=[f"a rank {FAULTS[fault]}" for fault in faults])
    axes.invert_yaxis()
    output.legend_below(figure, axes)
    output.save(figure, path)


def parse(arguments: Iterable[str] | None = None) -> argparse.Namespace:
    parser = output.make_parser(__doc__, "faults")
    parser.add_argument("--jobs", type=int, default=200, help="beside undisturbed ones, to be compared with")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=[name for name in FAULTS if name != "none"])
    parser.add_argument("--parallel", type=int, default=1, help="jobs at a time")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which a job counts as hung")
    return parser.parse_args(None if arguments is None else list(arguments))


def main() -> None:
    launch.end_cleanly_on_sigterm()
    arguments = parse()
    rows = campaign(arguments)
    show(rows, output.make_console())
    plot(rows, arguments.plot)
    if any(row["wrong"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

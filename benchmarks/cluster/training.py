"""Training steps on a cluster of network namespaces, by scheme: computation, sparsification, communication.

    sudo .venv/bin/python -m benchmarks.cluster.training --hosts 8 --rate 1gbit

A VGG-16, an LSTM, a transformer and GPTs train on real data through hvd.DistributedOptimizer. It needs root and
iproute2.
"""

from __future__ import annotations

import argparse

from tqdm import tqdm

from benchmarks import launch, output
from benchmarks.cluster.hosts import add_arguments, check_machine, cluster, dilated, in_words
from benchmarks.cluster.jobs import Result, options_of
from benchmarks.output import BLUE, GREY, ORANGE

Scheme = tuple[str, str, dict[str, object]]
SCHEMES: dict[str, tuple[str, dict[str, object]]] = {
    "Dense": ("Dense", {}), "float16": ("float16", {}), "OkTopk": ("OkTopk", {}),
    "StepAhead(OkTopk)": ("StepAhead", {}),
    "StepAhead(SameBlocks)": ("StepAhead(SameBlocks)", {}),
    "StepAhead(OkTopk), auto": ("StepAhead", {"density": "auto"}),
    "StepAhead(SameBlocks), auto": ("StepAhead(SameBlocks)", {"density": "auto"}),
    "StepAhead(OkTopk), at once": ("StepAhead", {"overlap": False}),
    "StepAhead(SameBlocks), at once": ("StepAhead(SameBlocks)", {"overlap": False}),
    "OkTopk, hierarchical": ("OkTopk", {"hierarchical": True}),
    "StepAhead(OkTopk), hierarchical": ("StepAhead", {"hierarchical": True}),
    "StepAhead(OkTopk), k sums": ("StepAhead", {"global_density": None}),
    "StepAhead(OkTopk), float32": ("StepAhead", {"value_dtype": None, "global_density": None}),
    "GTopk": ("GTopk", {}), "TopkDSA": ("TopkDSA", {}), "TopkA": ("TopkA", {}), "GaussianK": ("GaussianK", {})}
"""By name: the class, and its options beside the density. At once: without overlap."""
MODELS = {"vgg16": 14_728_266, "lstm": 27_608_320, "transformer": 10_769_792, "gpt": 812_160,
          "gpt-wide": 4_039_200}
"""Parameters."""
SECONDS = ("step", "sparsification", "communication", "computation", "computation_alone")
PARTS = {"computation": GREY, "sparsification": ORANGE, "communication": BLUE}


def plan_jobs(names: list[str]) -> list[tuple[list[Scheme], list[str]]]:
    """Return the schemes and options of each mpirun. Dense allreduces are also measured over MPI's ring."""
    over_ring: list[Scheme] = [(f"{name}, ring", *SCHEMES[name]) for name in names if name in ("Dense", "float16")]
    jobs: list[tuple[list[Scheme], list[str]]] = [([(name, *SCHEMES[name]) for name in names], [])]
    return [*jobs, (over_ring, options_of("ring"))] if over_ring else jobs


def measure(arguments: argparse.Namespace) -> list[Result]:
    """Return one dictionary for each model and scheme."""
    planned = [(model, *job) for model in arguments.models for job in plan_jobs(arguments.schemes)]
    found: list[Result] = []
    for model, schemes, options in tqdm(planned, unit="job"):
        settings = {"model": model, "schemes": schemes, "density": arguments.density, "warm_up": arguments.warm_up,
                    "steps": arguments.steps}
        with cluster(arguments.hosts, dilated(arguments.rate, arguments.dilation),
                     arguments.ranks_per_host) as hosts:
            results = launch.measured(hosts.mpirun(*options), "benchmarks.cluster.training_rank", settings,
                                      arguments.timeout)
        found += [{**r, **{name: r[name] / arguments.dilation for name in SECONDS}} for r in results]
    return found


def show(results: list[Result], arguments: argparse.Namespace) -> None:
    table = output.make_table(
        f"A training step on {arguments.hosts} hosts of {arguments.ranks_per_host} ranks at "
        f"{in_words(arguments.rate)}, density {arguments.density:.1%}; seconds", ["model", "scheme"],
        ["step", *PARTS, "MB sent", "steps faster than dense", "longer than computation alone"])
    for r in results:
        dense = next((d["step"] for d in results if (d["model"], d["scheme"]) == (r["model"], "Dense")), None)
        table.add_row(r["model"], r["scheme"], f"{r['step']:.3f}", *(f"{r[part]:.3f}" for part in PARTS),
                      f"{r['bytes_sent'] / 1e6:.2f}" if r["bytes_sent"] else "-",
                      f"{dense / r['step']:.1f}" if dense else "-", f"{r['step'] / r['computation_alone'] - 1:.0%}")
    output.make_console().print(table)


def plot(results: list[Result], arguments: argparse.Namespace) -> None:
    """Plot stacked bars, a panel for each model."""
    figure, panels = output.load_pyplot().subplots(
        1, len(arguments.models), figsize=(4.6 * len(arguments.models), 3.4), layout="constrained", squeeze=False)
    for axes, model in zip(panels[0], arguments.models, strict=True):
        mine = [r for r in results if r["model"] == model]
        ends = output.stacked_bars(axes, [r["scheme"] for r in mine],
                                   {part: [r[part] for r in mine] for part in PARTS}, PARTS)
        output.label_ends(axes, ends, "{:.2f}")
        axes.margins(x=0.15)
        axes.set(xlabel="seconds of a step", title=f"{model}, n = {MODELS[model]:,}")
    output.legend_below(figure, panels[0][0])
    output.save(figure, arguments.plot)


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = output.make_parser(__doc__, "training")
    add_arguments(parser)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="all, if not given")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, help="if not given, all but hosts, auto and at once",
                        default=[name for name in SCHEMES if not name.endswith(("hierarchical", "auto", "at once"))])
    parser.add_argument("--warm-up", type=int, default=12, help="steps of a sparse scheme before those timed")
    parser.add_argument("--steps", type=int, default=7, help="timed")
    arguments = parser.parse_args(line)
    check_machine(arguments.hosts, arguments.rate, max(MODELS[model] for model in arguments.models),
                  ranks_per_host=arguments.ranks_per_host)
    return arguments


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    launch.end_cleanly_on_sigterm()
    results = measure(arguments)
    output.write_json(arguments.json, results)
    show(results, arguments)
    plot(results, arguments)


if __name__ == "__main__":
    main()

"""Training steps on a cluster of network namespaces, by scheme: computation, sparsification, communication.

    sudo .venv/bin/python -m benchmarks.cluster.training --hosts 8 --rate 1gbit

A VGG-16, an LSTM and a transformer train on real data through hvd.DistributedOptimizer, one rank on each host. It
needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.cluster.hosts import check_machine, cluster, in_words, run_job

SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "Dense": ("Dense", {}), "OkTopk": ("OkTopk", {}),
    "OkTopk, 8 MB groups": ("OkTopk", {"bucket_bytes": 8_000_000}),
    "OkTopk, 32 MB groups": ("OkTopk", {"bucket_bytes": 32_000_000}),
    "OkTopk, auto groups": ("OkTopk", {"bucket_bytes": "auto"}),
    "GTopk": ("GTopk", {}), "TopkDSA": ("TopkDSA", {}), "TopkA": ("TopkA", {}), "GaussianK": ("GaussianK", {})}
"""By name: the class, and its options beside the density."""
TRIAL = 26
"""Steps after which automatic groups are settled."""
MODELS = {"vgg16": 14_728_266, "lstm": 27_608_320, "transformer": 10_769_792}
LOCAL_PHASES = ("accumulate", "select", "sum", "write_back")
PARTS = {"computation": "#999999", "sparsification": "#dd8452", "communication": "#4c72b0"}
RING = ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4")
Result = dict[str, Any]


def train(model_name: str, schemes: list[str], density: float, warm_up: int, steps: int) -> list[Result]:
    """On one rank: median seconds of a step and of its parts, for computation alone and for each scheme."""
    import horovod.torch as hvd
    import torch

    import horovod_oktopk.torch as plugin
    from benchmarks.data.models import WORKLOADS

    hvd.init()
    torch.set_num_threads(1)
    workload = WORKLOADS[model_name]
    computation = _median_step(_step_of(workload, None), warm_up, steps)["step"]
    found = []
    for scheme in schemes:
        name, options = SCHEMES[scheme]
        compression = plugin.Dense if name == "Dense" else getattr(plugin, name)(density=density, **options)
        before = {"Dense": 1, "OkTopk, auto groups": max(warm_up, TRIAL)}.get(scheme, warm_up)
        mine = _median_step(_step_of(workload, compression), before, steps)
        slowest = {key: max(hvd.allgather_object(value)) if key == "step" else
                   statistics.mean(hvd.allgather_object(value)) for key, value in mine.items()}
        step, sparsification = slowest["step"], slowest.get("sparsification", 0.0)
        exposed = max(0.0, step - computation - sparsification)  # of what is overlapped with the backward pass
        communication = exposed if "bucket_bytes" in options else slowest.get("communication", exposed)
        found.append({"model": model_name, "scheme": scheme, "step": step, "sparsification": sparsification,
                      "communication": communication, "computation": step - sparsification - communication,
                      "computation_alone": computation, "bytes_sent": slowest.get("bytes_sent")})
    return found


def _step_of(workload: Any, compression: Any) -> Callable[[], dict[str, float]]:
    """One training step of a new model; without a compression, on this rank alone."""
    import horovod.torch as hvd
    import torch

    from horovod_oktopk.torch import step_report
    torch.manual_seed(1)
    model = workload.make()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if compression is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    batches = workload.batches(workload.batch, hvd.rank())

    def step() -> dict[str, float]:
        batch = next(batches)
        hvd.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
        figures = {"step": time.perf_counter() - start}
        report = step_report(optimizer) if getattr(compression, "density", None) else None
        if report is not None:
            local = sum(report.phases[name].seconds for name in LOCAL_PHASES if name in report.phases)
            figures |= {"sparsification": local, "communication": report.seconds - local,
                        "bytes_sent": report.bytes_sent}
        return figures

    return step


def _median_step(step: Callable[[], dict[str, float]], warm_up: int, steps: int) -> dict[str, float]:
    figures = [step() for _ in range(warm_up + steps)][warm_up:]
    # Floats all: allgather_object names its tensors by the object's type.
    return {name: float(statistics.median(each[name] for each in figures)) for name in figures[0]}


def run_rank(arguments: argparse.Namespace) -> None:
    results = train(arguments.models[0], arguments.schemes, arguments.density, arguments.warm_up, arguments.steps)
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 0:
        arguments.json.write_text(json.dumps(results))


def measure(arguments: argparse.Namespace) -> list[Result]:
    """One dictionary for each model and scheme. Horovod's dense allreduce is also measured over MPI's ring."""
    sparse = [scheme for scheme in arguments.schemes if scheme != "Dense"]
    kinds = [(["Dense"], (), ""), (["Dense"], RING, ", ring")] if "Dense" in arguments.schemes else []
    kinds += [(sparse, (), "")] if sparse else []
    found = []
    for model, (schemes, settings, suffix) in tqdm([(model, kind) for model in arguments.models for kind in kinds],
                                                   unit="job"):
        with cluster(arguments.hosts, arguments.rate) as hosts, tempfile.TemporaryDirectory() as folder:
            outcome = Path(folder, "outcome.json")
            run_job(hosts.mpirun(*settings, sys.executable, "-m", __spec__.name, "--rank",
                                 "--models", model, "--schemes",
                                 *schemes, "--density", str(arguments.density), "--warm-up", str(arguments.warm_up),
                                 "--steps", str(arguments.steps), "--json", str(outcome)), arguments.timeout)
            found += [{**result, "scheme": result["scheme"] + suffix} for result in json.loads(outcome.read_text())]
    return found


def show(results: list[Result], arguments: argparse.Namespace) -> None:
    table = Table(title=f"A training step on {arguments.hosts} hosts at {in_words(arguments.rate)}, density "
                        f"{arguments.density:.1%}; seconds")
    for heading in ("model", "scheme"):
        table.add_column(heading, no_wrap=True)
    for heading in ("step", *PARTS, "MB sent", "steps faster than dense"):
        table.add_column(heading, justify="right")
    for r in results:
        dense = next((d["step"] for d in results if (d["model"], d["scheme"]) == (r["model"], "Dense")), None)
        table.add_row(r["model"], r["scheme"], f"{r['step']:.3f}", *(f"{r[part]:.3f}" for part in PARTS),
                      f"{r['bytes_sent'] / 1e6:.2f}" if r["bytes_sent"] else "-",
                      f"{dense / r['step']:.1f}" if dense else "-")
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)


def plot(results: list[Result], arguments: argparse.Namespace, path: Path) -> None:
    """Stacked bars, a panel for each model."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, panels = pyplot.subplots(1, len(arguments.models), figsize=(4.6 * len(arguments.models), 3.4),
                                     layout="constrained", squeeze=False)
    for axes, model in zip(panels[0], arguments.models, strict=True):
        mine = [r for r in results if r["model"] == model]
        left = [0.0] * len(mine)
        for part, color in PARTS.items():
            axes.barh([r["scheme"] for r in mine], [r[part] for r in mine], left=left, color=color, label=part)
            left = [start + r[part] for start, r in zip(left, mine, strict=True)]
        for row, r in enumerate(mine):
            axes.annotate(f"{r['step']:.2f}", (r["step"], row), xytext=(4, 0), textcoords="offset points",
                          va="center")
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel("seconds of a step")
        axes.set_title(f"{model}, n = {MODELS[model]:,}")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, such as 100mbit")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="all, if not given")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, help="all but those in groups, if not given",
                        default=[name for name in SCHEMES if "groups" not in name])
    parser.add_argument("--warm-up", type=int, default=12, help="steps of a sparse scheme before those timed")
    parser.add_argument("--steps", type=int, default=7, help="timed")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each job")
    parser.add_argument("--json", type=Path, default=Path("runs/training.json"))
    parser.add_argument("--plot", type=Path, default=Path("runs/training.png"))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.rank:
        run_rank(arguments)
        return
    check_machine(arguments.hosts, arguments.rate, max(MODELS[model] for model in arguments.models))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("cluster: terminated"))
    results = measure(arguments)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=1))
    show(results, arguments)
    plot(results, arguments, arguments.plot)


if __name__ == "__main__":
    main()

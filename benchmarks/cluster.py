"""A cluster on one machine: network namespaces as hosts, on a bridge, each link with a real TCP rate limit.

    sudo .venv/bin/python benchmarks/cluster.py --hosts 8 --rate 1gbit

runs benchmarks/allreduce.py with one rank on each host: dense allreduces, Horovod's own and MPI's with several
algorithms, beside every sparse scheme. It needs root and iproute2. The hosts are removed at the end, also after
a failure or Ctrl-C. Bytes are counted by the library and by the hosts' interfaces, and both are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

PROGRAM = Path(__file__).with_name("allreduce.py")
SUBNET = "10.213.0"
MPI_ALGORITHMS = {"MPI, ring": 4, "MPI, segmented ring": 5, "MPI, Rabenseifner": 6}
"""Open MPI's numbers of its allreduce algorithms (coll_tuned_allreduce_algorithm)."""
SCHEMES = ("Horovod dense", "MPI dense", "OkTopk", "TopkA", "TopkDSA", "GTopk", "GaussianK")
BYTES_PER_ELEMENT = 48
"""Memory that one rank needs for each gradient element, at most."""


@dataclass(frozen=True)
class Cluster:
    """hosts: namespaces, in rank order. agent: what mpirun starts instead of ssh."""

    hosts: list[str]
    agent: Path

    def mpirun(self, *arguments: str) -> list[str]:
        """The command line before the program's."""
        addresses = ",".join(f"{SUBNET}.{index + 1}:1" for index in range(len(self.hosts)))
        network = f"{SUBNET}.0/24"
        settings = {"plm_rsh_agent": str(self.agent), "btl": "tcp,self", "pml": "ob1", "btl_tcp_if_include": network,
                    "oob_tcp_if_include": network, "mpi_yield_when_idle": "1"}
        mca = [part for name, value in settings.items() for part in ("--mca", name, value)]
        return [str(Path(sys.executable).with_name("mpirun")), "--allow-run-as-root", "-np", str(len(self.hosts)),
                "--host", addresses, "--bind-to", "none", *mca, *arguments]


@contextmanager
def cluster(hosts: int, rate: str) -> Iterator[Cluster]:
    """Makes the hosts, and removes them whatever happens inside."""
    mark = f"ok{os.getpid()}"
    names = [f"{mark}-{index}" for index in range(hosts)]
    with ExitStack() as undo, tempfile.TemporaryDirectory() as folder:
        bridge = f"{mark}b"
        _ip("link", "add", bridge, "type", "bridge")
        undo.callback(_ip, "link", "del", bridge, check=False)
        _ip("addr", "add", f"{SUBNET}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for index, name in enumerate(names):
            link = f"{mark}v{index}"
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name, check=False)
            undo.callback(_ip, "link", "del", link, check=False)
            undo.callback(_end_processes, name)  # first, as a namespace lives as long as they do
            _connect(name, link, bridge, f"{SUBNET}.{index + 1}/24", rate)
        agent = Path(folder, "agent.sh")
        # The hosts share a disk, and daemons would meet in one session directory: each gets its own.
        agent.write_text(f'#!/bin/sh\nhost="$1"; shift\nindex=$((${{host##*.}} - 1))\n'
                         f'export OMPI_MCA_orte_tmpdir_base={folder}/$index\nmkdir -p {folder}/$index\n'
                         f'exec ip netns exec {mark}-$index sh -c "$*"\n')
        agent.chmod(0o755)
        yield Cluster(names, agent)


def _end_processes(name: str) -> None:
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for process in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def _connect(name: str, link: str, bridge: str, address: str, rate: str) -> None:
    """One host's link to the bridge, limited in both directions."""
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", link, "master", bridge, "up")
    _ip("-n", name, "addr", "add", address, "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", name, "link", "set", device, "up")
    limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
    _run("tc", "qdisc", "add", "dev", link, *limit)
    _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit)


def _ip(*arguments: str, check: bool = True) -> None:
    _run("ip", *arguments, check=check)


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"cluster: `{' '.join(command)}` failed: {done.stderr.strip()}")


def check_machine(hosts: int, rate: str, parameters: int) -> None:
    """Ends with a message where the machine cannot hold this cluster."""
    if os.geteuid() != 0:
        raise SystemExit("cluster: network namespaces need root: sudo .venv/bin/python benchmarks/cluster.py ...")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"cluster: {' and '.join(missing)} not found: install iproute2")
    if not 2 <= hosts <= 64:
        raise SystemExit(f"cluster: --hosts must be from 2 to 64; got {hosts}")
    if not re.fullmatch(r"[1-9][0-9]*(kbit|mbit|gbit)", rate):
        raise SystemExit(f"cluster: --rate must be such as 100mbit or 1gbit; got {rate!r}")
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    needed = hosts * (parameters * BYTES_PER_ELEMENT + (600 << 20))
    if needed > available:
        raise SystemExit(f"cluster: {hosts} ranks of {parameters:,} parameters need about {needed >> 30} GiB; "
                         f"{available >> 30} GiB are free")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One dictionary for each scheme, slowest ranks' figures."""
    jobs: list[tuple[str, list[str]]] = []
    for scheme in arguments.schemes:
        jobs.append((scheme, []))
        if scheme == "MPI dense":
            jobs += [(name, ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm",
                             str(number)]) for name, number in MPI_ALGORITHMS.items()]
    found = []
    with cluster(arguments.hosts, arguments.rate) as hosts, tempfile.TemporaryDirectory() as folder:
        for scheme, settings in tqdm(jobs, unit="scheme"):
            outcome = Path(folder, "outcome.json")
            program = "MPI dense" if scheme.startswith("MPI") else scheme
            run_job(hosts.mpirun(*settings, sys.executable, str(PROGRAM), "--scheme", program, "--json", str(outcome),
                                 "--parameters", str(arguments.parameters), "--density", str(arguments.density),
                                 "--steps", str(arguments.steps)), arguments.timeout)
            found.append({**json.loads(outcome.read_text()), "scheme": scheme})
    return found


def run_job(command: list[str], timeout: float) -> None:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
                 "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          start_new_session=True) as job:
        try:
            output, _ = job.communicate(timeout=timeout)
        except BaseException as error:
            os.killpg(job.pid, signal.SIGTERM)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise SystemExit(f"cluster: a job had not ended after {timeout:g} s: {' '.join(command)}") from None
    if job.returncode:
        raise SystemExit(f"cluster: a job failed: {' '.join(command)}\n{output}")


def show(results: list[dict[str, Any]], arguments: argparse.Namespace, console: Console) -> None:
    dense = next((r["seconds"] for r in results if r["scheme"] == "Horovod dense"), None)
    table = Table(title=f"One allreduce of {arguments.parameters:,} gradients on {arguments.hosts} hosts at "
                        f"{arguments.rate}, density {arguments.density:.1%}")
    table.add_column("scheme", no_wrap=True)
    for heading in ("seconds", "faster than Horovod dense", "bytes counted", "bytes on the interface"):
        table.add_column(heading, justify="right")
    for r in results:
        faster = f"{dense / r['seconds']:.1f}" if dense else ""
        counted = f"{r['bytes_sent'] / 1e6:.2f} MB" if r["bytes_sent"] is not None else "-"
        table.add_row(r["scheme"], f"{r['seconds']:.3f}", faster, counted, f"{r['interface_bytes'] / 1e6:.2f} MB")
    console.print(table)
    console.print("Medians of the steps; seconds of the slowest rank, bytes that the mean rank sent in a step. The "
                  "interface also counts headers and acknowledgements.")


def plot(results: list[dict[str, Any]], arguments: argparse.Namespace, path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 0.5 + 0.36 * len(results)), layout="constrained", sharey=True)
    names = [r["scheme"] for r in results]
    for axes, key, unit, factor in ((panels[0], "seconds", "seconds", 1.0),
                                    (panels[1], "interface_bytes", "megabytes that a rank sends", 1e-6)):
        values = [r[key] * factor for r in results]
        colors = ["#dd8452" if name == "OkTopk" else "#4c72b0" for name in names]
        axes.barh(names, values, color=colors)
        for row, value in enumerate(values):
            axes.annotate(f"{value:.2g}" if value < 10 else f"{value:.0f}", (value, row), xytext=(4, 0),
                          textcoords="offset points", va="center")
        axes.set_xlabel(unit)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.suptitle(f"One allreduce, n = {arguments.parameters:,}, density {arguments.density:.1%}, "
                    f"{arguments.hosts} hosts at {arguments.rate}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, such as 100mbit")
    parser.add_argument("--parameters", type=int, default=14_728_266, help="gradient elements (default: VGG-16)")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=5, help="timed, after three that are not")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES, help="all, if not given")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each scheme")
    parser.add_argument("--json", type=Path, default=Path("runs/cluster.json"))
    parser.add_argument("--plot", type=Path, default=Path("runs/cluster.png"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    check_machine(arguments.hosts, arguments.rate, arguments.parameters)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("cluster: terminated"))
    results = measure(arguments)
    console = Console()
    show(results, arguments, console if console.is_terminal else Console(width=120))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"arguments": {name: str(value) for name, value in vars(arguments).items()},
                                          "results": results}, indent=1))
    plot(results, arguments, arguments.plot)


if __name__ == "__main__":
    main()

"""A cluster on one machine: network namespaces as hosts, on a bridge, each link with a real TCP rate limit.

It needs root and iproute2. The hosts are removed at the end, also after a failure or Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launch import MPIRUN

SUBNET = "10.213.0"
SHARED_MEMORY = "/dev/shm"
BYTES_PER_ELEMENT, BYTES_PER_RANK = 32, 450 << 20
"""Memory that one rank needs, at most: for each gradient element, and for its libraries."""


@dataclass(frozen=True)
class Cluster:
    """Emulated hosts.

    hosts: namespaces, in rank order. agent: the program that mpirun starts instead of ssh. ranks_per_host: ranks that
    share a link, and memory.
    """

    hosts: list[str]
    agent: Path
    ranks_per_host: int = 1

    def mpirun(self, *options: str) -> list[str]:
        """Return the command line that stands before the program's."""
        each = self.ranks_per_host
        addresses = ",".join(f"{SUBNET}.{index + 1}:{each}" for index in range(len(self.hosts)))
        network, within = f"{SUBNET}.0/24", "vader," if each > 1 else ""
        settings = {"plm_rsh_agent": str(self.agent), "btl": f"tcp,{within}self", "pml": "ob1",
                    "btl_tcp_if_include": network, "oob_tcp_if_include": network, "mpi_yield_when_idle": "1"}
        mca = [part for name, value in settings.items() for part in ("--mca", name, value)]
        return [MPIRUN, "-np", str(each * len(self.hosts)), "--map-by", "slot",
                "--host", addresses, "--bind-to", "none", *mca, *options]


@contextmanager
def cluster(hosts: int, rate: str, ranks_per_host: int = 1) -> Iterator[Cluster]:
    """Make the hosts, and remove them whatever happens inside."""
    mark = f"ok{os.getpid()}"
    names = [f"{mark}-{index}" for index in range(hosts)]
    with (ExitStack() as undo, tempfile.TemporaryDirectory() as folder,
          tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory):
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
        yield Cluster(names, _write_agent(Path(folder), memory, mark), ranks_per_host)


def _write_agent(folder: Path, memory: str, mark: str) -> Path:
    """Write a script with ssh's arguments that starts a program on a host; hosts share the machine's disk.

    memory: a folder for what a host's ranks share.
    """
    agent = folder / "agent.sh"
    # Open MPI's daemons would meet in one session directory, and ranks in one shared memory: each host has its own.
    agent.write_text(f'#!/bin/sh\nhost="$1"; shift\nindex=$((${{host##*.}} - 1))\n'
                     f'export OMPI_MCA_orte_tmpdir_base={folder}/$index\nmkdir -p {folder}/$index {memory}/$index\n'
                     f'export OMPI_MCA_btl_vader_backing_directory={memory}/$index\n'
                     f'exec ip netns exec {mark}-$index sh -c "$*"\n')
    agent.chmod(0o755)
    return agent


def _end_processes(name: str) -> None:
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for process in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def _connect(name: str, link: str, bridge: str, address: str, rate: str) -> None:
    """Connect a host to the bridge by a link that is limited in both directions."""
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


def check_machine(hosts: int, rate: str, parameters: int, bytes_per_element: int = BYTES_PER_ELEMENT,
                  ranks_per_host: int = 1) -> None:
    """Raise SystemExit if there is no such cluster, or not on this machine."""
    if not 2 <= hosts <= 64:
        raise SystemExit(f"cluster: --hosts must be from 2 to 64; got {hosts}")
    if not re.fullmatch(r"[1-9][0-9]*(kbit|mbit|gbit)", rate):
        raise SystemExit(f"cluster: --rate must be such as 100mbit or 1gbit; got {rate!r}")
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if not 1 <= ranks_per_host <= 64:
        raise SystemExit(f"cluster: --ranks-per-host must be from 1 to 64; got {ranks_per_host}")
    ranks = hosts * ranks_per_host
    needed = ranks * (parameters * bytes_per_element + BYTES_PER_RANK)
    if needed > available:
        raise SystemExit(f"cluster: {ranks} ranks of {parameters:,} parameters need about {needed >> 30} GiB; "
                         f"{available >> 30} GiB are free")
    if os.geteuid() != 0:
        raise SystemExit("cluster: network namespaces need root: sudo .venv/bin/python -m benchmarks...")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"cluster: {' and '.join(missing)} not found: install iproute2")


def in_words(rate: str) -> str:
    """Return "1 Gbit/s" for "1gbit"."""
    return re.sub(r"([kmg])bit", lambda unit: f" {unit[1].replace('m', 'M').replace('g', 'G')}bit/s", rate)


def dilated(rate: str, dilation: int) -> str:
    """Return the rate at which this machine stands for one that is `dilation` times faster.

    See Gupta et al., NSDI 2006. Ranks that have a quarter of a core each, on links of a quarter of the rate, take
    four times as long in all they do.
    """
    number, unit = re.fullmatch(r"([0-9]+)([kmg]bit)", rate).groups()  # type: ignore[union-attr]
    return f"{int(number) * {'kbit': 1, 'mbit': 10**3, 'gbit': 10**6}[unit] // dilation}kbit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every benchmark on a cluster."""
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="L",
                        help="ranks that share a host's link, and talk to each other through memory")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, such as 100mbit")
    parser.add_argument("--dilation", type=int, default=1, metavar="D",
                        help="time dilation: links have 1/D of the rate, and seconds are divided by D. With D ranks "
                        "on each core: what hosts with a core for each rank would take, but for shared caches")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each job")

"""`python -m horovod_oktopk check`: what of the plugin works here. `... advise`: what it would be worth."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from . import __version__, advise
from .errors import OptionError
from .kernels import KERNELS
from .schemes.base import check_integer
from .schemes.oktopk import OkTopk
from .transport.connect import connect

Finding = tuple[bool, str]
"""True if the part works; and a version, or the reason why not and the remedy."""

SUPPORTED_HOROVOD = "0.28"
MPI_PROBE = """
import ctypes, glob, os
try:
    from horovod.torch.mpi_lib_v2 import __file__ as library
except ImportError:
    import horovod.tensorflow
    library = glob.glob(os.path.dirname(horovod.tensorflow.__file__) + "/mpi_lib*.so")[0]
from mpi4py import MPI
theirs, flag = ctypes.CDLL(library), ctypes.c_int()
print(MPI.Get_library_version().split(",")[0])
theirs.MPI_Initialized(ctypes.byref(flag))
print(flag.value)
"""
"""A program that starts MPI through mpi4py, and asks Horovod's libmpi if it has been started."""


def check_kernels() -> Finding:
    if KERNELS.name == "C++":
        return True, "C++"
    return True, ("NumPy, in which a step takes three to four times as long: for those in C++ install a C++ "
                  "compiler, and this package again")


def check_horovod() -> Finding:
    works, found = _version("horovod", "install Horovod 0.28.1, built for your framework (HOROVOD_WITH_PYTORCH=1, "
                                       "HOROVOD_WITH_TENSORFLOW=1)")
    if works and not found.startswith(SUPPORTED_HOROVOD):
        return False, f"found {found}, supported is {SUPPORTED_HOROVOD}: pip install 'horovod>=0.28.1,<0.29'"
    return works, found


def check_tensorflow() -> Finding:
    works, found = _integration("tensorflow", "TensorFlow", "HOROVOD_WITH_TENSORFLOW=1")
    if not works:
        return works, found
    keras = importlib.import_module(f"{__package__}.tensorflow.private").KERAS
    return True, f"{found} with {keras}"


def check_mpi() -> Finding:
    if find_spec("horovod") is None:
        return False, "Horovod is not installed"
    if not _horovod_says("mpi_built"):
        return False, "Horovod was built without MPI: build it with HOROVOD_WITH_MPI=1, or run on Gloo"
    if find_spec("mpi4py") is None:
        return False, "mpi4py is not installed: pip install mpi4py, or run on Gloo"
    return _probe_mpi()


def check_gloo() -> Finding:
    if find_spec("horovod") is None:
        return False, "Horovod is not installed"
    if not _horovod_says("gloo_built"):
        return False, "Horovod was built without Gloo: build it with HOROVOD_WITH_GLOO=1, or run on MPI"
    return True, "through Horovod's own alltoall and allgather"


def check_cuda() -> Finding:
    if find_spec("torch") is None:
        return False, "PyTorch is not installed"
    if not importlib.import_module("torch").cuda.is_available():
        return False, "PyTorch sees no CUDA device; gradients on the CPU work"
    if not _horovod_says("nccl_built"):
        return True, "gradients on CUDA devices; Horovod's own dense allreduce goes without NCCL"
    return True, "gradients on CUDA devices, Horovod with NCCL"


SECTIONS: dict[str, dict[str, Callable[[], Finding]]] = {
    "Packages": {"horovod_oktopk": lambda: (True, __version__),
                 "NumPy": lambda: _version("numpy", "pip install numpy"),
                 "Kernels": check_kernels, "Horovod": check_horovod},
    "Integrations": {"PyTorch": lambda: _integration("torch", "PyTorch", "HOROVOD_WITH_PYTORCH=1"),
                     "TensorFlow": check_tensorflow},
    "Transports": {"MPI": check_mpi, "Gloo": check_gloo},
    "Devices": {"CUDA": check_cuda},
}


def check() -> int:
    """Print what works and what does not; return 0 if the plugin can act here at all, else 1."""
    works: dict[str, bool] = {}
    for section, checks in SECTIONS.items():
        print(f"{section}:")
        for name, look in checks.items():
            works[name], found = look()
            print(f"    [{'X' if works[name] else ' '}] {name}: {found}")
    can_act = (works["NumPy"] and works["Horovod"] and (works["PyTorch"] or works["TensorFlow"])
               and (works["MPI"] or works["Gloo"]))
    print("OkTopk can be used here." if can_act else "OkTopk cannot be used here.")
    return 0 if can_act else 1


def add_advise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parameters", type=int, required=True, help="n, gradient elements of the model")
    parser.add_argument("--density", type=float, default=0.01, help="share of them that is selected (0.01)")
    parser.add_argument("--global-density", type=float,
                        help="share that is kept of the sum (OkTopk: the density; StepAhead: 32 times that)")
    parser.add_argument("--ranks", type=int, help="P")
    parser.add_argument("--bandwidth", help="of a rank's link in each direction, with its unit: 10gbit, 940mbit/s")
    parser.add_argument("--latency", default="50us", help="of one message, with its unit: 50us, 0.1ms (50us)")
    parser.add_argument("--measure", action="store_true",
                        help="measure bandwidth and latency between the ranks of this job, under horovodrun")


def run_advise(arguments: argparse.Namespace) -> int:
    """Print the prediction, on rank 0; return 0."""
    options = OkTopk(density=arguments.density,
                     global_density="auto" if arguments.global_density is None else arguments.global_density)
    check_integer("--parameters", arguments.parameters)
    if arguments.measure:
        size, rank, network = _measure()
    else:
        if arguments.ranks is None or arguments.bandwidth is None:
            raise OptionError("give --ranks and --bandwidth, or --measure under horovodrun")
        check_integer("--ranks", arguments.ranks)
        size, rank = arguments.ranks, 0
        network = advise.Network(advise.parse_latency(arguments.latency), advise.parse_bandwidth(arguments.bandwidth))
    selection = advise.measure_selection(arguments.parameters, arguments.density)
    if rank == 0:
        print(advise.report(arguments.parameters, size, options, network, selection))
    return 0


def _measure() -> tuple[int, int, advise.Network]:
    """Return (size, rank, network) of this job."""
    name = next((name for name in ("torch", "tensorflow") if find_spec(name) is not None), None)
    if name is None:
        raise OptionError("--measure needs PyTorch or TensorFlow, with Horovod: install one (docs/install.md)")
    hvd = importlib.import_module(f"horovod.{name}")
    hvd.init()
    if hvd.size() == 1:
        raise OptionError("--measure needs several ranks: use horovodrun -np P python -m horovod_oktopk advise ...")
    ranks = importlib.import_module(f"{__package__}.{name}.transport").ranks_of(hvd.global_process_set)
    return hvd.size(), hvd.rank(), advise.measure_network(connect(ranks, "auto"))


def _integration(package: str, name: str, variable: str) -> Finding:
    if find_spec(package) is None:
        return False, f"{name} is not installed: pip install {package}, then build Horovod with {variable}"
    try:
        importlib.import_module(f"{__package__}.{package}")
    except Exception as error:
        return False, f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
    return True, f"{name} {metadata.version(package)}"


def _version(package: str, advice: str) -> Finding:
    try:
        return True, metadata.version(package)
    except metadata.PackageNotFoundError:
        return False, f"not installed: {advice}"


def _horovod_says(question: str) -> bool:
    """Return the answer of horovod.torch or horovod.tensorflow; False if neither can be imported."""
    for framework in ("torch", "tensorflow"):
        try:
            return bool(getattr(importlib.import_module(f"horovod.{framework}"), question)())
        except Exception:  # whatever a broken framework raises
            continue
    return False


def _probe_mpi() -> Finding:
    """Start MPI in a process of its own, as starting MPI may end the process that does it."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    mpirun = shutil.which("mpirun", path=os.pathsep.join(places))
    if mpirun is None:
        return False, "mpirun was not found beside Python or on PATH: install the MPI of Horovod, or run on Gloo"
    try:
        probe = subprocess.run([mpirun, "-np", "1", sys.executable, "-c", MPI_PROBE], capture_output=True, text=True,
                               timeout=60, env=_outside_of_jobs(), check=False)
    except subprocess.TimeoutExpired:
        return False, "starting MPI took more than 60 s; try: mpirun -np 1 python -c 'from mpi4py import MPI'"
    lines = probe.stdout.splitlines()[-2:]  # TensorFlow and Horovod may have printed before
    if probe.returncode:
        last = probe.stderr.strip("-\n ").splitlines()[-1:] or ["it ended without a message"]
        return False, f"mpi4py does not start ({last[0]}): install it for the MPI that Horovod was built with"
    if lines[1] != "1":
        return False, f"mpi4py runs on {lines[0]}, Horovod on another: install mpi4py for the MPI of Horovod"
    return True, f"{lines[0]}, mpi4py {metadata.version('mpi4py')}"


def _outside_of_jobs() -> dict[str, str]:
    """Return this environment without a launcher's variables, which would make the probe one of its ranks."""
    launcher = ("OMPI_COMM_", "OMPI_MCA_orte_", "OMPI_MCA_ess", "PMIX_", "PMI_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {Path(__file__).parent.name}", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="say what works here, and what does not")
    add_advise(commands.add_parser("advise", help="predict what dense, OkTopk and StepAhead cost on a network"))
    arguments, unknown = parser.parse_known_args()
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; see --help. advise takes each host as one rank: "
                     "let --ranks be the number of hosts, without --ranks-per-host and --memory-bandwidth")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's notices would hide the answer
    if arguments.command == "check":
        return check()
    try:
        return run_advise(arguments)
    except OptionError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())

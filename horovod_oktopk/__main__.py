"""`python -m horovod_oktopk check`: what of the plugin works here. `... advise`: what it would be worth."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import __version__, advise
from .errors import OptionError
from .kernels import KERNELS, NATIVE, SLOW
from .schemes.oktopk import OkTopk
from .schemes.options import DEFAULT_DENSITY, check_integer, check_real
from .transport.connect import connect
from .transport.horovod import SUPPORTED, VERSION
from .vectors.layout import MAX_ELEMENTS

MPI4PY_PROBE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print("mpi4py:", *MPI.Get_library_version().splitlines()[0].split(",")[0].split())
"""
"""A program that tells mpi4py's MPI library. It loads no other, whose functions mpi4py could call instead."""
MPI_PROBE = """
import ctypes, glob, os
try:
    from horovod.torch.mpi_lib_v2 import __file__ as library
except ImportError:
    import horovod.tensorflow
    library = glob.glob(os.path.dirname(horovod.tensorflow.__file__) + "/mpi_lib*.so")[0]
theirs, text, number = ctypes.CDLL(library), ctypes.create_string_buffer(8192), ctypes.c_int()
theirs.MPI_Get_library_version(text, ctypes.byref(number))
print("horovod:", *text.value.decode().splitlines()[0].split(",")[0].split(), flush=True)
from mpi4py import MPI
theirs.MPI_Initialized(ctypes.byref(number))
print("shared:", number.value)
"""
"""A program that tells Horovod's MPI library, starts MPI through mpi4py, and asks Horovod's if it runs."""
LAUNCHER = "OMPI_COMM_", "OMPI_UNIVERSE_", "OMPI_MCA_orte_", "OMPI_MCA_ess", "PMIX_", "PMI_"
"""Beginnings of a launcher's variables, which would make the probe one of its ranks."""
OWN_MPI = ("put the mpirun of Horovod's MPI first on PATH, then pip install --no-binary mpi4py --force-reinstall "
           "mpi4py; or pip uninstall mpi4py, and Horovod's own collectives carry the messages")
"""The remedy for an mpi4py that does not run on Horovod's MPI library."""
TRY_MPI = "try: mpirun -np 1 python -c 'from mpi4py import MPI'"
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


ALONE = ("--measure needs several ranks: use horovodrun -np P python -m horovod_oktopk advise ..., or torchrun "
         "--nproc-per-node P -m horovod_oktopk advise ...")
LAUNCHED = ("TORCHELASTIC_RUN_ID", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables that launchers set for a rank. Without any, MPI may end the process before it has asked for its size."""


class MissingError(Exception):
    """A part that does not work here: why, and the remedy."""


def require(there: object, remedy: str) -> None:
    if not there:
        raise MissingError(remedy)


def check_kernels() -> str:
    return str(KERNELS.name) if NATIVE else f"NumPy: {SLOW}"


def check_horovod() -> str:
    require(find_spec("horovod"), f"not installed: install Horovod {VERSION}, built for your framework "
                                  "(HOROVOD_WITH_PYTORCH=1, HOROVOD_WITH_TENSORFLOW=1)")
    version = metadata.version("horovod")
    require(version.startswith(SUPPORTED),
            f"found {version}, supported is {SUPPORTED}: build {VERSION} as docs/install.md tells")
    return version


def check_integration(package: str, name: str, variable: str) -> str:
    require(find_spec(package), f"{name} is not installed: pip install {package}, then build Horovod with {variable}")
    importlib.import_module(f"{__package__}.{package}")
    return f"{name} {importlib.import_module(package).__version__}"  # a distribution may have another name


def check_tensorflow() -> str:
    found = check_integration("tensorflow", "TensorFlow", "HOROVOD_WITH_TENSORFLOW=1")
    return f"{found} with {importlib.import_module(f'{__package__}.tensorflow.private').KERAS}"


def check_mpi() -> str:
    require(find_spec("horovod"), "Horovod is not installed")
    require(horovod_says("mpi_built"),
            "Horovod was built without MPI: build it with HOROVOD_WITH_MPI=1, or run on Gloo")
    require(find_spec("mpi4py"), "mpi4py is not installed: pip install mpi4py; "
                                 "until then Horovod's own collectives carry the messages")
    own, complaint = run_probe(MPI4PY_PROBE)
    mine = own.get("mpi4py", f"none that loads ({complaint})")
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    require(mpirun, "mpirun was not found beside Python or on PATH: install the MPI of Horovod, or run on Gloo")
    found, complaint = run_probe(MPI_PROBE, str(mpirun), "-np", "1")
    theirs = found.get("horovod", mine)
    require("shared" in found or mine != theirs, f"MPI does not start ({complaint}); {TRY_MPI}")
    require(found.get("shared") == "1", f"mpi4py runs on {mine}, Horovod on {theirs}: {OWN_MPI}")
    by_mpirun = "; start jobs with mpirun: horovodrun needs Open MPI 4" if theirs.startswith("Open MPI v5") else ""
    return f"{theirs}, mpi4py {metadata.version('mpi4py')}{by_mpirun}"


def run_probe(program: str, *launcher: str) -> tuple[dict[str, str], str]:
    """Run a probe in a process of its own, as starting MPI may end the process that does it.

    Return what the probe says, as far as it came, and its exception or the last line of its errors.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)} | ROOT
    try:
        probe = subprocess.run([*launcher, sys.executable, "-c", program], capture_output=True, text=True, timeout=60,
                               env=variables, check=False)
    except subprocess.TimeoutExpired:
        raise MissingError(f"starting MPI took more than 60 s; {TRY_MPI}") from None
    # TensorFlow and Horovod print, too; and after an exception, mpirun.
    found = dict(re.findall(r"^(horovod|mpi4py|shared): (.+)$", probe.stdout, re.MULTILINE))
    raised = re.findall(r"^\w*Error: .+", probe.stderr, re.MULTILINE)
    return found, ([*probe.stderr.strip("-\n ").splitlines()[-1:], *raised] or ["it ended without a message"])[-1]


def check_gloo() -> str:
    require(find_spec("horovod"), "Horovod is not installed")
    require(horovod_says("gloo_built"),
            "Horovod was built without Gloo: run on MPI, or build it with HOROVOD_WITH_GLOO=1")
    return "through Horovod's own alltoall and allgather"


def check_torchrun() -> str:
    require(find_spec("torch"), "PyTorch is not installed")
    dist = importlib.import_module("torch.distributed")
    require(dist.is_available() and dist.is_gloo_available(), "PyTorch was built without torch.distributed, or Gloo")
    importlib.import_module(f"{__package__}.distributed")
    return "Gloo, by torch.distributed: horovod_oktopk.distributed, which needs no Horovod"


def check_cuda() -> str:
    require(find_spec("torch"), "PyTorch is not installed")
    require(importlib.import_module("torch").cuda.is_available(),
            "PyTorch sees no CUDA device; gradients on the CPU work")
    if find_spec("horovod") is None:
        return "gradients on CUDA devices"
    if not horovod_says("nccl_built"):
        return "gradients on CUDA devices; Horovod's own dense allreduce goes without NCCL"
    return "gradients on CUDA devices, Horovod with NCCL"


def some_horovod() -> Any:
    """Return horovod.torch or horovod.tensorflow; None if neither can be imported."""
    for framework in ("torch", "tensorflow"):
        with suppress(Exception):  # whatever a broken framework raises
            return importlib.import_module(f"horovod.{framework}")
    return None


def horovod_says(question: str) -> bool:
    hvd = some_horovod()
    return hvd is not None and bool(getattr(hvd, question)())


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "Packages": {"horovod_oktopk": lambda: __version__, "NumPy": lambda: metadata.version("numpy"),
                 "Kernels": check_kernels, "Horovod": check_horovod},
    "Integrations": {"PyTorch": lambda: check_integration("torch", "PyTorch", "HOROVOD_WITH_PYTORCH=1"),
                     "TensorFlow": check_tensorflow},
    "Transports": {"MPI": check_mpi, "Gloo": check_gloo, "torchrun": check_torchrun},
    "Devices": {"CUDA": check_cuda},
}
"""By section and part, functions that return a version or the like, or raise MissingError."""


def check() -> int:
    """Print what works and what does not; return 0 if the plugin can act here at all, else 1."""
    works: dict[str, bool] = {}
    for section, checks in SECTIONS.items():
        print(f"{section}:")
        for name, look in checks.items():
            try:
                found, works[name] = look(), True
            except MissingError as missing:
                found, works[name] = str(missing), False
            except Exception as error:  # whatever a broken framework raises
                opening = (str(error).splitlines() or ["no message"])[0]
                found, works[name] = f"{type(error).__name__}: {opening}", False
            print(f"    [{'X' if works[name] else ' '}] {name}: {found}")
    # On MPI without mpi4py Horovod's own collectives serve.
    transport = works["MPI"] or works["Gloo"] or horovod_says("mpi_built")
    with_horovod = works["Horovod"] and (works["PyTorch"] or works["TensorFlow"]) and transport
    by_torchrun = " with torchrun (horovod_oktopk.distributed), and not with Horovod" * (not with_horovod)
    can_act = with_horovod or works["torchrun"]
    print(f"OkTopk can be used here{by_torchrun}." if can_act else "OkTopk cannot be used here.")
    return 0 if can_act else 1


def add_advise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parameters", type=int, required=True, help="n, gradient elements of the model")
    parser.add_argument("--density", type=float, default=DEFAULT_DENSITY,
                        help=f"fraction of them that is selected ({DEFAULT_DENSITY})")
    parser.add_argument("--global-density", type=float,
                        help="fraction that is kept of the sum (OkTopk: the density; StepAhead: 32 times that)")
    parser.add_argument("--ranks", type=int, help="P, each alone on its link; with hierarchical, of workers (with "
                                                  "--measure: those of this job)")
    parser.add_argument("--bandwidth", help="of a rank's link in each direction, with its unit: 10gbit, 940mbit/s")
    parser.add_argument("--latency", help="of one message, with its unit: 50us, 0.1ms (50us)")
    parser.add_argument("--measure", action="store_true",
                        help="measure bandwidth and latency between the ranks, under horovodrun or torchrun")


def run_advise(arguments: argparse.Namespace) -> int:
    """Print the prediction, on rank 0; return 0."""
    check_real("--density", arguments.density, "in (0, 1]", lambda x: 0 < x <= 1)
    options = OkTopk(density=arguments.density,
                     global_density="auto" if arguments.global_density is None else arguments.global_density)
    check_integer("--parameters", arguments.parameters)
    if arguments.parameters >= MAX_ELEMENTS:
        raise OptionError(f"--parameters must be below {MAX_ELEMENTS}, as one optimizer reduces no more; got "
                          f"{arguments.parameters}: divide the model among several optimizers, and give each one's")
    if arguments.ranks is not None:
        check_integer("--ranks", arguments.ranks, ": one rank sends nothing, and compresses nothing", least=2)
    if arguments.measure:
        if arguments.bandwidth or arguments.latency:
            raise OptionError("--measure finds bandwidth and latency: give them, or --measure, and not both")
        size, rank, network = _measure()
        size = arguments.ranks or size
    else:
        if arguments.ranks is None or arguments.bandwidth is None:
            raise OptionError("give --ranks and --bandwidth, or --measure under horovodrun or torchrun")
        size, rank = arguments.ranks, 0
        network = advise.Network(advise.parse_latency(arguments.latency or "50us"),
                                 advise.parse_bandwidth(arguments.bandwidth))
    n = arguments.parameters
    seconds = advise.measure_selection(n, arguments.density), advise.measure_blocks(n)
    if rank == 0:
        print(advise.report(n, size, options, network, *seconds))
    return 0


def _measure() -> tuple[int, int, advise.Network]:
    if not any(name in os.environ for name in LAUNCHED):
        raise OptionError(ALONE)
    ranks = _ranks_of_torchrun() if "TORCHELASTIC_RUN_ID" in os.environ else _ranks_of_horovod()
    rank, size, _ = ranks.membership()
    if size == 1:
        raise OptionError(ALONE)
    return size, rank, advise.measure_network(connect(ranks, "auto").transport)


def _ranks_of_horovod() -> Any:
    hvd = some_horovod()
    if hvd is None:
        raise OptionError("--measure needs PyTorch or TensorFlow, with Horovod: install one (docs/install.md)")
    hvd.init()
    place = "torch.horovod" if hvd.__name__ == "horovod.torch" else "tensorflow.tensors"
    return importlib.import_module(f"{__package__}.{place}").ranks_of(hvd.global_process_set)


def _ranks_of_torchrun() -> Any:
    importlib.import_module("torch.distributed").init_process_group("gloo")
    return importlib.import_module(f"{__package__}.distributed.groups").GroupRanks(None)


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {Path(__file__).parent.name}", description=__doc__)
    parser.add_argument("--version", action="version", version=f"horovod_oktopk {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="say what works here, and what does not")
    add_advise(commands.add_parser("advise", help="predict what a scheme adds to a step on a network"))
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's notices would hide the answer
    if arguments.command == "check":
        return check()
    try:
        return run_advise(arguments)
    except OptionError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())

"""The ranks of a process set of Horovod, and its collectives for NCCL and Gloo; checks of an integration."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import PluginError
from .base import Counts, Values
from .collectives import CollectivesTransport
from .connect import introduce
from .ending import LEFT
from .ranks import Hierarchical, Membership, NoMPI, Ranks, TransportName
from .stalls import StallWarning, noticed

logger = logging.getLogger("horovod_oktopk")

NO_SETS = ("hierarchical needs Horovod's process sets for the ranks of each host, and for those that have the same "
           "place on each host; missing are {missing}. Call hvd.init(process_sets=\"dynamic\"), and give the "
           "optimizer no process set")


class HorovodTransport(CollectivesTransport):
    """A framework's Horovod over one process set.

    Calls of a channel follow one another, so one name serves for each kind.
    `hvd` is horovod.torch or horovod.tensorflow. `to_tensor` returns an array as a tensor, on the host. `around`
    returns a context for a call. A call may raise any of `failures`. The first of these is raised in place of any,
    for elastic training to catch it.
    """

    hvd: ClassVar[Any]
    to_tensor: ClassVar[Any]
    around: ClassVar[Any] = nullcontext
    failures: ClassVar[tuple[type[Exception], ...]]

    def __init__(self, process_set: Any, channel: int | str) -> None:
        self.rank, self.size = int(process_set.rank()), int(process_set.size())
        self._set, self._name = process_set, f"horovod_oktopk.{channel}"

    def _allgather(self, values: NDArray[Any]) -> NDArray[Any]:
        return self._call("allgather", values)

    def allreduce(self, values: Values) -> Values:
        return self._call("allreduce", np.ascontiguousarray(values), op=self.hvd.Sum)

    def _alltoall(self, values: NDArray[Any], splits: NDArray[np.int32]) -> NDArray[Any]:
        return self._call("alltoall", values, splits)

    def _call(self, kind: str, *arrays: NDArray[Any], **options: Any) -> NDArray[Any]:
        """Call one of Horovod's collectives. A failure says that a rank has left the job, where it has."""
        try:
            with self.around(), noticed(StallWarning(f"rank {self.rank} of {self.size}").note_wait):
                found = getattr(self.hvd, kind)(*map(self.to_tensor, arrays), name=f"{self._name}.{kind}",
                                                process_set=self._set, **options)
                return np.asarray(found[0] if kind == "alltoall" else found)  # an alltoall gives its splits, too
        except self.failures as error:
            raise self.failures[0](explain(error)) from error


def explain(error: Exception) -> str:
    """Return the text of a failure of Horovod's collectives, preceded by the cause if a rank has left the job."""
    return f"{LEFT}. {error}" if "Horovod has been shut down" in str(error) else str(error)


class HorovodRanks(Ranks):
    """The ranks of one process set, as they are at present: elastic training changes them.

    The transport is that over the framework's collectives. `own_channel` tells that the reduction may run at the same
    time as others.
    """

    resets: ClassVar[int] = 0
    """The number of resets of an elastic job: ranks may have changed, even if this rank's number stays."""

    collectives = "Horovod's collectives"

    def __init__(self, process_set: Any, transport: type[HorovodTransport],
                 own_channel: bool = False, yield_cpu: bool = False) -> None:
        self.base = self.hvd = transport.hvd
        self.process_set = process_set
        self.channel = next(_channels[process_set.process_set_id]) if own_channel else 0
        self.yield_cpu = yield_cpu
        self._transport = transport
        self._in_job: Counts  # the ranks' numbers in the whole job, after `divide`; and the groups' process sets
        self._sets: dict[tuple[int, ...], Any] = {}

    @property
    def takes_part(self) -> bool:
        return bool(self.process_set.included())

    def membership(self) -> Membership:
        return Membership(int(self.process_set.rank()), int(self.process_set.size()), self.resets)

    def host(self) -> tuple[int, int | None]:
        is_whole = self.process_set.size() == self.hvd.size()  # Horovod counts the whole job's ranks of a host
        return self.hvd.rank() - self.hvd.local_rank(), int(self.hvd.local_size()) if is_whole else None

    def divide(self, groups: Iterable[Counts]) -> None:
        is_whole = self.process_set.size() == self.hvd.size()
        mine = [self.hvd.rank(), is_whole and os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"]
        self._in_job, may_add = self.transport("divide").allgather(np.array(mine, np.int64)).T
        known = {tuple(ranks): number
                 for number, ranks in self.hvd.mpi_ops._basics._get_process_set_ids_and_ranks().items()}
        needed = dict.fromkeys(tuple(self._in_job[members].tolist()) for members in groups if len(members) > 1)
        missing = [list(ranks) for ranks in needed if ranks not in known]
        if missing and not may_add.all():
            raise PluginError(NO_SETS.format(missing=missing))
        self._sets = {ranks: self._set_of(ranks, known[ranks]) if ranks in known
                      else self.hvd.add_process_set(list(ranks)) for ranks in needed}

    def transport(self, channel: int | str, members: Counts | None = None) -> HorovodTransport:
        ranks = self.process_set if members is None else self._sets[tuple(self._in_job[members].tolist())]
        return self._transport(ranks, channel)

    def host_set(self, choice: TransportName, hierarchical: Hierarchical) -> Any:
        """Return Horovod's process set of this rank's host; None if the rank is alone there. Collective.

        Raise as `connect` does, and PluginError if process sets cannot be added. All ranks raise the same error.
        """
        if self.process_set.size() == 1:
            return None
        _, grid = introduce(self, choice, hierarchical)
        if grid is None:
            return None
        self.divide(grid)
        return next(each for ranks, each in self._sets.items() if self.hvd.rank() in ranks)

    def mpi_rank(self) -> int | NoMPI:
        if not self.hvd.mpi_enabled():
            return NoMPI("Horovod does not run on MPI (start the job with `horovodrun --mpi`)", warns=False)
        if os.environ.get("HOROVOD_MPI_THREADS_DISABLE") == "1" or not self.hvd.mpi_threads_supported():
            return NoMPI("MPI runs without MPI_THREAD_MULTIPLE (unset HOROVOD_MPI_THREADS_DISABLE)")
        if importlib.util.find_spec("mpi4py") is None:
            return NoMPI("mpi4py is not installed (pip install mpi4py)")
        import mpi4py
        mpi4py.rc.initialize = mpi4py.rc.finalize = False  # Horovod has started MPI, and ends it
        from mpi4py import MPI
        if not MPI.Is_initialized():
            return NoMPI("mpi4py has loaded another MPI library than Horovod; rebuild one of the two")
        return int(MPI.COMM_WORLD.rank)

    def _set_of(self, ranks: tuple[int, ...], number: int) -> Any:
        found = self.hvd.ProcessSet(list(ranks))
        found.process_set_id = number
        return found


_channels: defaultdict[int, Iterator[int]] = defaultdict(lambda: itertools.count(1))

VERSION = "0.28.1"
"""The version of Horovod to install."""
SUPPORTED = VERSION.rpartition(".")[0]
"""The beginning of all versions that will do."""
NEEDED = ("{package} needs {framework}, and Horovod {version} built for it ({variable}=1); '{missing}' is not "
          "installed. Install it as docs/install.md says. `python -m horovod_oktopk check` says what is there")
ADVICE = f"this version of horovod_oktopk supports Horovod {SUPPORTED}: install horovod=={VERSION}"


def what_is_missing(error: ModuleNotFoundError, package: str, framework: str, variable: str) -> ModuleNotFoundError:
    """Return the error to raise if a framework or Horovod is not there; the error itself, if it is another module.

    The variable is the one with which Horovod is built for the framework.
    """
    if error.name not in ("torch", "tensorflow", "horovod"):
        return error
    return ModuleNotFoundError(NEEDED.format(package=package, framework=framework, variable=variable,
                                             missing=error.name, version=VERSION), name=error.name)


def check_horovod(version: str, signatures: Mapping[Callable[..., Any], list[str]]) -> None:
    """Raise PluginError if this Horovod is not the known version. Warn if its autotuning is on.

    The signatures are the parameters that each function of Horovod is expected to take.
    """
    if not version.startswith(SUPPORTED):
        raise PluginError(f"{ADVICE}; found {version}")
    for function, expected in signatures.items():
        found = list(inspect.signature(function).parameters)
        if found != expected:
            raise PluginError(f"{ADVICE}; its {function.__qualname__} should take {expected}, and takes {found}")
    if os.environ.get("HOROVOD_AUTOTUNE") == "1":
        logger.warning("HOROVOD_AUTOTUNE tunes Horovod's own messages, and none of OkTopk's: unset it, unless some "
                       "optimizer of the job has a dense allreduce")


def check_arguments(hvd: Any, op: Any, predivide: float = 1.0) -> None:
    """Raise PluginError if op cannot be served, and ValueError as `hvd`, a framework's Horovod, does."""
    if op not in (hvd.Average, hvd.Sum):
        raise PluginError(f"with a sparse compression op must be hvd.Average or hvd.Sum; got op={op!r}"
                          + (" (Adasum)" if op == hvd.Adasum else ""))
    if predivide != 1.0 and op != hvd.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")


def refuse_join(in_use: Callable[[], bool], join: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap hvd.join, to refuse it while a reduction of ours is in use."""
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if in_use():
            raise PluginError("hvd.join() cannot be used with a sparse compression: the ranks that go on would wait "
                              "for this one. Give every rank the same number of batches instead")
        return join(*args, **kwargs)
    return wrapped

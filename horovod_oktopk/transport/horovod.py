"""The ranks of a process set of Horovod, its elastic states, and checks before an integration takes its place."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from ..errors import PluginError
from .base import NOT_ON_MPI, Counts, Hierarchical, Membership, Ranks, TransportName
from .collectives import HorovodTransport
from .connect import introduce

logger = logging.getLogger("horovod_oktopk")

NO_SETS = ("hierarchical needs Horovod's process sets for the ranks of each host, and for those that have the same "
           "place on all hosts; missing are {missing}. Call hvd.init(process_sets=\"dynamic\"), and give the "
           "optimizer no process set")


class HorovodRanks(Ranks):
    """The ranks of one process set, as they are at present: elastic training changes them.

    The transport is that over the framework's collectives. `own_channel` tells that the reduction may run at the same
    time as others.
    """

    resets: ClassVar[int] = 0
    """The number of resets of an elastic job: ranks may have changed, even if this rank's number stays."""

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

    def mpi_rank(self) -> int | str:
        if not self.hvd.mpi_enabled():
            return NOT_ON_MPI
        if os.environ.get("HOROVOD_MPI_THREADS_DISABLE") == "1" or not self.hvd.mpi_threads_supported():
            return "MPI runs without MPI_THREAD_MULTIPLE (unset HOROVOD_MPI_THREADS_DISABLE)"
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed (pip install mpi4py)"
        import mpi4py
        mpi4py.rc.initialize = mpi4py.rc.finalize = False  # Horovod has started MPI, and ends it
        from mpi4py import MPI
        if not MPI.Is_initialized():
            return "mpi4py has loaded another MPI library than Horovod; rebuild one of the two"
        return int(MPI.COMM_WORLD.rank)

    def _set_of(self, ranks: tuple[int, ...], number: int) -> Any:
        found = self.hvd.ProcessSet(list(ranks))
        found.process_set_id = number
        return found


_channels: defaultdict[int, Iterator[int]] = defaultdict(lambda: itertools.count(1))

_mixins: list[tuple[type, type]] = []


class ElasticState:
    """The mixin of any elastic state of Horovod. It counts how often ranks may have changed."""

    def on_reset(self) -> None:
        HorovodRanks.resets += 1
        super().on_reset()  # type: ignore[misc]

    def _when_made(self) -> None:
        """Save anew what the constructor has saved before the state had its class; nothing here."""


@functools.cache
def _own_class(plain: type) -> type:
    mixin = next((mixin for state, mixin in _mixins if issubclass(plain, state)), ElasticState)
    return type(plain.__name__, (mixin, plain), {"__module__": plain.__module__})


def extend_elastic(base: Any, state: type, mixin: type[ElasticState]) -> None:
    """Wrap the constructor of all elastic states, so that each gets a class of its own: its mixin, then its class.

    `base` is horovod.common.elastic.State, which is wrapped once. States of the class `state` get this mixin; all
    others get ElasticState alone.
    """
    _mixins.append((state, mixin))
    _own_class.cache_clear()  # a class may have been made of a state whose mixin was not known
    make = base.__init__
    if hasattr(make, "_oktopk_installed"):
        return

    @functools.wraps(make)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if not isinstance(self, ElasticState):
            self.__class__ = _own_class(type(self))  # type: ignore[arg-type]
        self._when_made()

    wrapped._oktopk_installed = True  # type: ignore[attr-defined]
    base.__init__ = wrapped


NEEDED = ("{package} needs {framework}, and Horovod 0.28.1 built for it ({variable}=1); '{missing}' is not "
          "installed. Install it as docs/install.md says. `python -m horovod_oktopk check` says what is there")
ADVICE = "this version of horovod_oktopk supports Horovod 0.28: install horovod==0.28.1"


def what_is_missing(error: ModuleNotFoundError, package: str, framework: str, variable: str) -> ModuleNotFoundError:
    """Return the error to raise if a framework or Horovod is not there; the error itself, if it is another module.

    The variable is the one with which Horovod is built for the framework.
    """
    if error.name not in ("torch", "tensorflow", "horovod"):
        return error
    return ModuleNotFoundError(NEEDED.format(package=package, framework=framework, variable=variable,
                                             missing=error.name), name=error.name)


def check_horovod(version: str, signatures: Mapping[Callable[..., Any], list[str]]) -> None:
    """Raise PluginError if this Horovod is not the known version. Warn if its autotuning is on.

    The signatures are the parameters that each function of Horovod is expected to take.
    """
    if not version.startswith("0.28"):
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

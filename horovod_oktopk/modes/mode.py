"""A Mode: the exchange around the steps of one optimizer. Integrations know no other interface of a reduction."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np

from ..errors import PluginError, TransportError
from ..hosts.worker import Worker, worker_of
from ..kernels import KERNELS, NATIVE, SLOW
from ..phases.agreement import NOW, Attendance, digest_of, roll_call
from ..schemes.algorithm import Memory
from ..schemes.base import Scheme
from ..schemes.report import StepReport
from ..selection.selection import Selection
from ..state.records import Record, Stateful
from ..transport.base import Membership, Ranks
from ..transport.connect import Connection, connect
from ..transport.counting import CountingTransport
from ..vectors.layout import Layout
from ..vectors.sparse import SparseVector, Values
from .density import DensityControl
from .gradients import Gradients

logger = logging.getLogger("horovod_oktopk")

Theirs = TypeVar("Theirs", bound=Gradients)
"""The gradients that a mode works on."""

OTHER_RATES = ("the ranks have different learning rates at step %d: replicas drift apart, or with StepAhead the "
               "moves of one rank count less than those of another. Set the same on all ranks: a scheduler that "
               "follows a metric needs its mean over the ranks (hvd.allreduce; in Keras MetricAverageCallback before "
               "it)")


class Reduction(Stateful):
    """A scheme's algorithm among the ranks of one optimizer, while elastic training may change who they are.

    The transport is made when it is first needed.
    """

    title: str
    """The name of the compression, for the log."""
    samples: ClassVar[int] = 0
    """Length of the sample that every roll call has."""
    _has_warned = False
    _rates = 0

    def __init__(self, scheme: Scheme, layout: Layout, ranks: Ranks) -> None:
        self.scheme, self.layout, self.ranks = scheme, layout, ranks
        self.memory = Memory()
        self.worker = Worker(scheme.algorithm(self.unit))
        self.control = DensityControl()
        """The search for the density, if that is measured."""
        self.report: StepReport | None = None
        """Report of the last step; None before the first."""
        self._described: tuple[Scheme, str] | None = None  # and its description, which is long
        self._transport: CountingTransport | None = None
        self._membership: Membership | None = None

    @property
    def k(self) -> int:
        """Number of elements to select, at least 1."""
        return self.scheme.k_of(self.layout.n)

    @property
    def is_alone(self) -> bool:
        """True if this rank is the only one: nothing is compressed then."""
        return self.ranks.membership().size == 1

    def alone_report(self, finite: bool) -> StepReport:
        """Return the report of a step of the only rank, which keeps all elements; count the step."""
        self.memory = replace(self.memory, step=self.memory.step + 1)
        n = self.layout.n
        return StepReport(self.memory.step, n, n, n, finite, local_selected=n, global_selected=n)

    def alone_record(self) -> Record:
        """Return the record of the only rank, which has nothing that it has not sent."""
        own = self.record_of(np.zeros(self.layout.n, self.layout.dtype), {"step": self.memory.step}, 1.0)
        return {**own, "shared": None, "steps": 0, "noise": None}

    @property
    def transport(self) -> CountingTransport:
        """The transport to all ranks; after `connect`."""
        assert self._transport is not None
        return self._transport

    @property
    def is_current(self) -> bool:
        """True if there is a transport, and its ranks are the present ones."""
        return self._transport is not None and self._membership == self.ranks.membership()

    def reset_if_membership_changed(self) -> None:
        """Forget all that depends on the ranks, if elastic training has changed them; before a step."""
        if self._transport is not None and not self.is_current:
            self._transport = None
            self.forget_ranks()

    def forget_ranks(self) -> None:
        """Forget all that depends on the ranks."""
        self.memory = self.memory.forgotten()
        self.measure_from(0)

    def measure_from(self, level: int) -> None:
        """Search for the density, if it is measured, from a level on that rank 0 tells at the next step."""
        if self.scheme.measures:
            self.control = DensityControl(level)
            self.scheme = self.scheme.at(self.control.density)

    @property
    def _decides(self) -> bool:
        return self.scheme.measures and self.ranks.membership().rank == 0

    def hear(self, level: int) -> None:
        """Change the density, as rank 0 has told, if it is measured."""
        if self.scheme.measures and self.control.hear(level):
            self.scheme = self.scheme.at(self.control.density)

    def connect(self, said: str | None = None) -> CountingTransport:
        """Return the transport to all ranks. A new one begins with a roll call, so that differences show at once.

        This rank says `said` there, by default its `description`. Collective.
        Raise AgreementError if the ranks differ, TransportError if Horovod and the transport number the ranks
        differently.
        """
        self.reset_if_membership_changed()
        if self._transport is None:
            self._membership = rank, size, _ = self.ranks.membership()
            connection = connect(self.ranks, self.scheme.transport, self.scheme.hierarchical)
            transport = connection.transport
            if (transport.rank, transport.size) != (rank, size):
                raise TransportError(f"Horovod calls this rank {rank} of {size}; the transport calls it "
                                     f"{transport.rank} of {transport.size}")
            roll_call(Attendance(said or self.description, self.k), transport)
            self.worker = worker_of(self.scheme.algorithm(self.unit), connection)
            self._transport = transport
            if rank == 0:
                logger.info("%s: n = %s in %d tensors, k = %s; %s; kernels in %s", self.title, f"{self.layout.n:,}",
                            len(self.layout.entries), f"{self.k:,}", _ranks_of(connection), KERNELS.name)
                if NATIVE is None:
                    logger.warning("the kernels are NumPy's, and %s", SLOW)
        return self._transport

    @property
    @abstractmethod
    def description(self) -> str:
        """The options and parameters that must be equal on all ranks, one "name: value" a line."""

    def meet(self, doing: str) -> CountingTransport:
        transport = self.connect()
        self.check_agreement(f"{self.description}\n{NOW}{doing}")
        return transport

    def check_agreement(self, description: str) -> None:
        """Hold a roll call alone, after `connect`. Collective."""
        algorithm, transport = self.worker.algorithm, self.transport
        nothing = Selection.of(SparseVector.empty(np.float32), 0.0)
        said = replace(self.said(), description=description)
        self.worker.agree(said)
        roll_call(replace(said, counts=algorithm.counts(nothing, 0, Memory(), transport.size)), transport)

    def said(self, finite: bool = True, sample: Values | None = None) -> Attendance:
        """Return what this rank says in a step's roll call. Its sample is NaN if it has measured nothing."""
        if self._described is None or self._described[0] is not self.scheme:
            self._described = self.scheme, self.description
        sample = np.full(self.samples, np.nan, np.float32) if sample is None else sample
        level = self.control.told if self._decides else 0
        return Attendance(self._described[1], self.k, self.memory.step, finite, sample=sample, rates=self._rates,
                          level=level)

    def open(self) -> CountingTransport:
        """Return the transport for a step, which counts anew; the step before is over."""
        if self._decides:
            self.control.note_step()
        self.transport.reset()
        return self.transport

    def tell_rates(self, rates: Sequence[float]) -> None:
        """Tell the other ranks, in the next step's roll call, which learning rates this rank has."""
        self._rates = digest_of(rates)

    def _note(self, report: StepReport) -> None:
        """Take note of a step's report. Warn, once, if the ranks have different learning rates."""
        self.report = report
        if not report.same_rates and not self._has_warned:
            self._has_warned = True
            logger.warning(OTHER_RATES, report.step)

    @contextmanager
    def writing(self, report: StepReport) -> Iterator[None]:
        """Count and time the block as a step's write-back; then the report shares nothing with the transport."""
        self.transport.log.phases = report.phases
        with self.transport.phase("write_back"):
            yield
        self.transport.reset()


def _ranks_of(connection: Connection) -> str:
    size, grid = connection.transport.size, connection.grid
    where = "" if grid is None else f" on {len(grid)} hosts, each of which is one worker,"
    if size == 1:
        return "1 rank, so nothing is compressed"
    return f"{size} ranks{where} over {connection.transport.route}"


class Channel(NamedTuple):
    """The needs of a mode's messages: to travel beside others', and to leave the processor to the program."""

    own: bool
    yields: bool


class Mode(Reduction, Generic[Theirs]):
    """The exchange of one optimizer's results, around its steps, on this rank.

    A step, on all ranks alike:

        for _ in range(mode.begin(gradients, settings)):
            settings = mode.prepare(gradients)
            the optimizer's own step, with these settings, with coefficient · gain times its learning rate, and with
            1/gain of its decoupled weight decay
        mode.end()

    Gradients are in true units: a program that scales a loss divides before. Methods that communicate raise
    AgreementError or TransportError, on all ranks.

    Gradients stay this rank's own until `begin`, unless a mode `reduce`s them before. If it `reads_memory`,
    parameters are read as they lie in memory. `refused` holds features that a program must not use, and the advice.
    """

    reads_memory: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = {}
    coefficient: float = 1.0
    gain: float = 1.0
    drifts = False
    """True if replicas may differ, and `synchronize` is to be followed by an average of the parameters."""
    holds_own = False
    """True while the model holds this rank's own parameters."""
    is_started = True
    """False if the next step starts from the model's parameters."""
    adopts = False
    """True if rank 0's parameters are taken at the first step if a rank has others, in place of a local step."""

    def reduce(self, gradients: Theirs, others_finite: bool = True) -> None:
        """Replace the gradients by their mean or sum over the ranks; by NaN if one is not finite on some rank.

        `others_finite` is False if anything that this rank reduces by other means in this step (sparse gradients) is
        not finite.
        """

    @abstractmethod
    def begin(self, gradients: Theirs, settings: Sequence[float] = (), scaled: bool = False) -> int:
        """Return how many steps of the optimizer follow.

        The settings are hyperparameters that travel with the gradients. A loss scaler takes the step if it is
        `scaled`; then none follows if a gradient was not finite.
        """

    def prepare(self, gradients: Theirs) -> Sequence[float]:  # noqa: ARG002
        """Write the gradients of the optimizer's next step; return its hyperparameters, if they are not its own."""
        return ()

    def end(self) -> None:
        """Finish a step."""

    def synchronize(self, for_good: bool = False) -> Iterator[int]:  # noqa: ARG002
        """Yield how many steps of the optimizer follow, until all ranks have seen the same rounds. Collective.

        If `for_good`, this rank takes no more steps, and `close` follows.
        """
        return iter(())

    def close(self) -> None:
        """End what the mode has under way, after the last step."""

    @classmethod
    def check(cls, feature: str, **found: object) -> None:
        """Raise PluginError, with advice that names what was found, if a program must not use this feature."""
        if feature in cls.refused:
            raise PluginError(cls.refused[feature].format(**found))

    @classmethod
    def channel(cls, options: Any) -> Channel:
        """Return what the messages of a mode with these options need."""
        return Channel(own=True, yields=getattr(options, "overlap", True))

    def pause(self, doing: str) -> None:
        """Tell the other ranks that this one takes no step now, and what it does. Collective."""
        self.meet(doing)

    def belongs_to(self, owner: object) -> None:
        """End everything that would outlive the owner when the owner is gone. The owner holds this object."""

    @abstractmethod
    def refuse_step(self, message: str, signature: Sequence[str] | None = None) -> NoReturn:
        """Raise PluginError for a step that cannot be taken; the ranks that do take it raise AgreementError.

        The signature has lines on the gradients at hand; by default they are those of the layout, and the message.
        """

    def set_density(self, density: float | None) -> None:
        """Select another fraction of the elements from the next step on; None stands for that of the options.

        Raise OptionError for a density that is not allowed.
        """
        self.scheme = self.scheme.with_density(density)
        self.measure_from(0)

    def shared(self) -> AbstractContextManager[None]:
        """Return a context in which the model holds the parameters that all ranks share."""
        return nullcontext()

    def suspend(self) -> None:
        """Put the parameters that all ranks share into the model, until the next step begins anew."""

    def resume(self) -> None:
        """Continue, before the next step, with a state that was loaded."""

"""A scheme among the ranks of one optimizer, step after step, while elastic training may change who they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from ..errors import TransportError
from ..hosts.worker import Worker, worker_of
from ..kernels import KERNELS, NATIVE, SLOW
from ..phases.agreement import Attendance, digest_of_rates, roll_call
from ..schemes.algorithm import Memory
from ..schemes.options import Scheme, Unit
from ..schemes.report import StepReport
from ..schemes.step import Outcome
from ..selection.selection import Selection
from ..transport.connect import connect
from ..transport.counting import CountingTransport
from ..transport.ranks import Membership, Ranks
from ..vectors.layout import Layout
from ..vectors.sparse import SparseVector, Values
from .auto_density import DensityControl

logger = logging.getLogger("horovod_oktopk")

OTHER_RATES = ("the ranks have different learning rates at step %d: replicas drift apart, or with StepAhead the "
               "moves of one rank count less than those of another. Set the same on all ranks: a scheduler that "
               "follows a metric needs its mean over the ranks (hvd.allreduce, "
               "dist.all_reduce; in Keras MetricAverageCallback before it)")


class Reduction:
    """A scheme's algorithm among the ranks of one optimizer. The transport is made when it is first needed.

    `describe` returns the options and parameters that must be equal on all ranks, one "name: value" a line. Every
    roll call has this number of `samples`. `forget` is called where other ranks are found, before a step.
    """

    def __init__(self, scheme: Scheme, layout: Layout, ranks: Ranks, title: str, describe: Callable[[Scheme], str],
                 unit: Unit = "gradients", samples: int = 0, forget: Callable[[], None] = lambda: None) -> None:
        self.scheme, self.layout, self.ranks, self.title = scheme, layout, ranks, title
        self.memory = Memory()
        self.worker = Worker(scheme.algorithm(unit))
        self.control = DensityControl(scheme.densities)
        """The search for the density, if that is measured."""
        self.report: StepReport | None = None
        """Report of the last step; None before the first."""
        self._unit, self._samples, self._describe, self._forget = unit, samples, describe, forget
        self._last_description: tuple[Scheme, str] | None = None  # which is long, and the scheme that it is of
        self._transport: CountingTransport | None = None
        self._membership: Membership | None = None
        self._has_warned, self._rates = False, 0

    @property
    def k(self) -> int:
        """Number of elements to select, at least 1."""
        return self.scheme.k_of(self.layout.n)

    # The ranks.

    @property
    def is_alone(self) -> bool:
        """True if this rank is the only one: nothing is compressed then."""
        return self.ranks.membership().size == 1

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
            self._transport, self._has_warned = None, False
            self._forget()
            self.memory = self.memory.forgotten()
            self.measure_from(0)

    def connect(self) -> CountingTransport:
        """Return the transport to all ranks. A new one begins with a roll call, so that differences show at once.

        Collective. Raise AgreementError if the ranks differ, TransportError if Horovod and the transport number the
        ranks differently.
        """
        self.reset_if_membership_changed()
        if self._transport is None:
            self._membership = rank, size, _ = self.ranks.membership()
            connection = connect(self.ranks, self.scheme.transport, self.scheme.hierarchical)
            transport = connection.transport
            if (transport.rank, transport.size) != (rank, size):
                raise TransportError(f"the library calls this rank {rank} of {size}; the transport calls it "
                                     f"{transport.rank} of {transport.size}")
            roll_call(Attendance(self.first_description, self.k), transport)
            self.worker = worker_of(self.scheme.algorithm(self._unit), connection)
            self._transport = transport
            if rank == 0:
                logger.info("%s: n = %s in %d tensors, k = %s; %s; kernels in %s", self.title, f"{self.layout.n:,}",
                            len(self.layout.entries), f"{self.k:,}", connection, KERNELS.name)
                if NATIVE is None:
                    logger.warning("the kernels are NumPy's, and %s", SLOW)
        return self._transport

    # The density.

    def set_density(self, density: float | None) -> None:
        if density is None and self.scheme.measures:
            return  # the search goes on: a program may say so at each epoch
        self.scheme = self.scheme.with_density(density)
        self.measure_from(0)

    def measure_from(self, level: int) -> None:
        """Begin the search for the density anew, if it is measured: from this level on, when rank 0 has told it."""
        if self.scheme.measures:
            self.control = DensityControl(self.scheme.densities, level)
            self.scheme = self.scheme.at(self.control.density)

    @property
    def _decides(self) -> bool:
        return self.scheme.measures and self.ranks.membership().rank == 0

    # What ranks say.

    @property
    def description(self) -> str:
        """The options and parameters that must be equal on all ranks."""
        if self._last_description is None or self._last_description[0] is not self.scheme:
            self._last_description = self.scheme, self._describe(self.scheme)
        return self._last_description[1]

    @property
    def first_description(self) -> str:
        """The same for the roll call in which the ranks meet: also what must be equal then, and stays so."""
        return self.description

    def check_agreement(self, description: str) -> None:
        """Hold a roll call alone, after `connect`. Collective."""
        algorithm, transport = self.worker.algorithm, self.transport
        nothing = Selection.of(SparseVector.empty(np.float32), 0.0)
        said = replace(self.attendance(), description=description)
        self.worker.agree(said)
        roll_call(replace(said, counts=algorithm.counts(nothing, 0, Memory(), transport.size)), transport)

    def attendance(self, finite: bool = True, sample: Values | None = None) -> Attendance:
        """Return what this rank says in a step's roll call, before it has selected: the step adds the counts.

        Its sample is NaN if it has measured nothing.
        """
        sample = np.full(self._samples, np.nan, np.float32) if sample is None else sample
        level = self.control.told if self._decides else 0
        return Attendance(self.description, self.k, self.memory.step, finite, sample=sample, rates=self._rates,
                          level=level)

    def tell_rates(self, rates: Sequence[float]) -> None:
        """Tell the other ranks, in the next step's roll call, which learning rates this rank has."""
        self._rates = digest_of_rates(rates)

    # A step.

    def open(self) -> CountingTransport:
        """Return the transport for a step, which counts anew; the step before is over."""
        if self._decides:
            self.control.note_step()
        self.transport.reset()
        return self.transport

    def step_alone(self, finite: bool) -> tuple[Memory, StepReport]:
        """Return the memory after a step of the only rank, which keeps all elements, and the step's report."""
        memory, n = replace(self.memory, step=self.memory.step + 1), self.layout.n
        return memory, StepReport(memory.step, n, n, n, finite, local_selected=n, global_selected=n)

    def note(self, outcome: Outcome) -> None:
        """Take note of a step's report. Change the density to the level that rank 0 has told, if it is measured.

        Warn, once, if the ranks have different learning rates.
        """
        self.report = outcome.report
        if self.scheme.measures and self.control.hear(outcome.level):
            self.scheme = self.scheme.at(self.control.density)
        if not outcome.report.same_rates and not self._has_warned:
            self._has_warned = True
            logger.warning(OTHER_RATES, outcome.report.step)

    @contextmanager
    def writing(self, report: StepReport) -> Iterator[None]:
        """Count and time the block as a step's write-back; then the report shares nothing with the transport."""
        self.transport.log.phases = report.phases
        with self.transport.phase("write_back"):
            yield
        self.transport.reset()

"""The reduction of one flat vector, step after step: what every integration has in common.

An integration says where gradients lie (a Layout), hands them over as pieces, and writes the sparse
update that it gets back into its framework's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import numpy as np

from ..core.accumulator import Accumulator
from ..core.agreement import roll_call
from ..core.report import StepReport
from ..core.sparse import DenseVector, SparseVector
from ..errors import PluginError, TransportError
from ..options import Scheme
from ..transport.connect import Network
from ..transport.counting import CountingTransport
from .layout import Layout
from .state import THIS_PROCESS, Record, record, share_of

Update = SparseVector | DenseVector
Piece = tuple[int, Any]
"""(offset, flat array on the accumulator's device)."""


class FlatReducer:
    """Reduces one flat vector over the ranks of a network; one object on each rank.

    average: whether the sum is divided by the number of ranks.
    lines: what must be equal on all ranks of the gradients, "name: value"; the layout's description if not given.
    Raises OptionError where the options ask for more elements than there are.
    """

    def __init__(self, options: Scheme, average: bool, layout: Layout, accumulator: Accumulator, network: Network,
                 lines: Sequence[str] | None = None) -> None:
        self.options = options
        self.layout = layout
        self.accumulator = accumulator
        self.network = network
        self.report: StepReport | None = None
        self.residual_scale: float | None = None
        """The loss scale that the residual's unit holds; None where gradients are not scaled."""
        self._average = average
        self._lines = layout.describe() if lines is None else lines
        self._transport: CountingTransport | None = None
        self._membership: tuple[int, int] | None = None
        options.k_of(max(1, layout.n))
        self.algorithm = options.scheme(self._description(self._lines))

    def step(self, pieces: Iterable[Piece], scale: float | None = None,
             representable: Callable[[Update], bool] = lambda _: True) -> Update | None:
        """The update, or None where it is not finite on every rank: then no residual has changed.

        pieces: this rank's gradient. scale: the loss scale that it holds, if any.
        representable: whether the gradients' dtypes can hold an update.
        Raises AgreementError where the ranks differ, TransportError where communication fails.
        """
        transport = self.connect()
        transport.reset()
        if self.layout.n == 0:
            self.meet(self.algorithm.description)
            return SparseVector.empty(self.layout.dtype)
        with transport.phase("accumulate"):
            ratio = scale / self.residual_scale if scale and self.residual_scale else 1.0
            finite = self.accumulator.accumulate(pieces, ratio)
        reduction = self.algorithm.reduce(self.accumulator, self.options.k_of(self.layout.n), finite, transport)
        self.report = reduction.report
        with transport.phase("write_back"):
            update = reduction.update
            if update is not None and self._average:
                update = update.divided(transport.size)
            if update is None or not representable(update):
                self.report.finite = False
                return None
            self.accumulator.commit(reduction.contributed, reduction.remainder)
            self.residual_scale = scale or self.residual_scale
        return update

    def writing(self) -> AbstractContextManager[None]:
        """What happens inside counts as the step's write-back."""
        assert self._transport is not None
        return self._transport.phase("write_back")

    def refuse(self, lines: Sequence[str], message: str) -> NoReturn:
        """Raises PluginError for a step that cannot be taken; the ranks that do take it raise AgreementError.

        lines: of the gradients at hand.
        """
        self.connect()
        self.meet(self._description(lines))
        raise PluginError(message)

    def set_density(self, density: float) -> None:
        """From the next step on, another fraction of the elements is selected. All ranks must do so together.

        Raises OptionError for a density that is not allowed, and where k was given as a number.
        """
        self.options = self.options.with_density(density)
        self.algorithm.description = self._description(self._lines)

    def record(self) -> Record:
        """This rank's residual (a copy, NumPy) and counters, as `load` takes them."""
        return record(*self.network.membership(), self.accumulator.read_residual(), self.residual_scale,
                      self.algorithm.state())

    def load(self, records: Sequence[Record]) -> None:
        """Takes this rank's share of the records that `record` gave on these or other ranks; none starts anew."""
        self.take(share_of(records, *self.network.membership(), self.layout, process=THIS_PROCESS))

    def take(self, share: Record) -> None:
        """Takes what `share_of` has worked out for this rank."""
        self.algorithm.forget()
        self.algorithm.step = share["algorithm"]["step"]
        if share["algorithm"].keys() != {"step"}:  # whole
            self.algorithm.load_state(share["algorithm"])
        self.residual_scale = share["residual_scale"]
        self.accumulator.load_residual(share["residual"])

    def _description(self, lines: Sequence[str]) -> str:
        settings = [f"{name}: {value}" for name, value in self.options.settings().items()]
        return "\n".join([f"compression: {type(self.options).__name__}", *settings,
                          f"op: {'Average' if self._average else 'Sum'}", *lines])

    def connect(self) -> CountingTransport:
        """The transport; a new one where elastic training has changed who the ranks are."""
        membership = self.network.membership()
        if self._transport is None or membership != self._membership:
            if self._transport is not None:
                self.algorithm.forget()
            self._transport = CountingTransport(self.network.connect(self.options.transport))
            self._membership = membership
            if (self._transport.rank, self._transport.size) != membership:
                raise TransportError(f"Horovod calls this rank {membership[0]} of {membership[1]}; the transport "
                                     f"calls it {self._transport.rank} of {self._transport.size}")
        return self._transport

    def meet(self, description: str) -> None:
        """A roll call alone."""
        assert self._transport is not None
        k = self.options.k_of(self.layout.n) if self.layout.n else 0
        roll_call(self._transport, description, k, self.algorithm.step, finite=True, state=0,
                  counts=np.zeros(self._transport.size, np.int64))

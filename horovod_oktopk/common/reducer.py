"""The reduction of one model's gradients, step after step: what every integration has in common.

An integration says where gradients lie (a Layout), hands them over as pieces, group by group, and writes the
sparse updates that it gets back into its framework's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, NoReturn

import numpy as np

from ..core.accumulator import Accumulator
from ..core.agreement import roll_call
from ..core.reduction import Reduction
from ..core.report import StepReport
from ..core.sparse import DenseVector, SparseVector, Values
from ..errors import PluginError, TransportError
from ..options import Scheme
from ..transport.connect import Network
from ..transport.counting import CountingTransport
from .groups import Group, L, cut, load_residual, read_residual
from .state import THIS_PROCESS, Record, record, share_of
from .trial import GroupTrial, Sample

Update = SparseVector | DenseVector
Piece = tuple[int, Any]
"""(offset, flat array on the accumulator's device)."""


class FlatReducer(Generic[L]):
    """Reduces the gradients of one layout over the ranks of a network; one object on each rank.

    A step is `reduce` for every group, in order, and then `finish`: no residual changes before all groups are
    known to be finite on all ranks.

    average: whether the sum is divided by the number of ranks. make_accumulator: for a group's layout.
    lines: what must be equal on all ranks of the gradients, "name: value"; the layout's description if not given.
    order: the gradients in the order in which they become ready; from last to first if not given.
    Raises OptionError where the options ask for more elements than there are.
    """

    def __init__(self, options: Scheme, average: bool, layout: L, make_accumulator: Callable[[L], Accumulator],
                 network: Network, lines: Sequence[str] | None = None, order: Sequence[int] | None = None) -> None:
        self.options = options
        self.layout = layout
        self.network = network
        self.report: StepReport | None = None
        self.residual_scale: float | None = None
        """The loss scale that the residual's unit holds; None where gradients are not scaled."""
        self._average = average
        self._lines = layout.describe() if lines is None else lines
        self._transport: CountingTransport | None = None
        self._membership: tuple[int, int] | None = None
        self._scale: float | None = None
        self._reductions: list[Reduction] = []
        self._make_accumulator = make_accumulator
        self._order = list(range(len(layout.entries)))[::-1] if order is None else list(order)
        options.k_of(max(1, layout.n))
        self.groups = self._grouped(cut(layout, self._order, options.bucket_bytes))
        self.trial = self._new_trial()
        """Where bucket_bytes is "auto": it finds the best groups."""

    def reduce(self, index: int, pieces: Iterable[Piece], scale: float | None = None) -> None:
        """Reduces one group, for `finish`. All ranks take the groups in the same order, from the first.

        pieces: this rank's gradients of the group; they may change afterwards. scale: the loss scale that they hold.
        Where an earlier group of this step failed, or is not finite, nothing is done.
        Raises AgreementError where the ranks differ, TransportError where communication fails.
        """
        if index == 0:
            self._reductions, self._scale = [], scale
        elif len(self._reductions) < index or not self._reductions[-1].report.finite:
            return
        transport, group = self.connect(), self.groups[index]
        transport.reset()
        if group.layout.n == 0:
            self.meet(group.algorithm.description)
            report = StepReport(step=group.algorithm.step, n=0, k=0, phases=transport.phases)
            reduction = Reduction(SparseVector.empty(group.layout.dtype), np.empty(0, np.int64), report)
        else:
            with transport.phase("accumulate"):
                ratio = scale / self.residual_scale if scale and self.residual_scale else 1.0
                finite = group.accumulator.accumulate(pieces, ratio)
            reduction = group.algorithm.reduce(group.accumulator, self.options.k_of(group.layout.n), finite,
                                               transport)
        self._reductions.append(reduction)

    def finish(self) -> list[Update] | None:
        """The groups' updates; None where one is not finite on every rank: then no residual has changed."""
        assert self._transport is not None
        self.report = StepReport.of_groups([reduction.report for reduction in self._reductions])
        self._transport.phases = self.report.phases
        with self.writing():
            updates = self._updates()
            if updates is None:
                self.report.finite = False
                return None
            for group, reduction in zip(self.groups, self._reductions, strict=True):
                if group.layout.n:
                    group.accumulator.commit(reduction.contributed, reduction.remainder)
            self.residual_scale = self._scale or self.residual_scale
        return updates

    def _updates(self) -> list[Update] | None:
        assert self._transport is not None
        updates = []
        for group, reduction in zip(self.groups, self._reductions, strict=False):
            update = reduction.update
            if update is not None and self._average:
                update = update.divided(self._transport.size)
            if update is None or not group.layout.representable(update):
                return None
            updates.append(update)
        return updates

    def learn(self, sample: Sample) -> None:
        """After a step: takes note of its times where a trial is on, and other groups where they promise more."""
        assert self._transport is not None
        assert self.report is not None
        if self.trial is not None and self.report.finite:  # as all ranks know
            groups = self.trial.learn(sample, self._transport)
            if groups is not None:
                self._regroup(groups)

    def heed_membership(self) -> None:
        """Before a step's first group: where elastic training has changed who the ranks are, a trial begins anew."""
        if self._membership not in (None, self.network.membership()):
            self._restart_trial()

    def _new_trial(self) -> GroupTrial | None:
        return GroupTrial(self.layout, self._order) if self.options.bucket_bytes == "auto" else None

    def _restart_trial(self) -> None:
        if self.trial is not None:
            self.trial = self._new_trial()
            self._regroup(cut(self.layout, self._order, None))

    def _regroup(self, cuts: Sequence[tuple[int, ...]]) -> None:
        """Other groups, with the same residual."""
        if [group.members for group in self.groups] != cuts:
            share = self.record()
            self.groups = []  # their memory is free before the new ones need it
            self.groups = self._grouped(cuts)
            self._take(share)

    def _grouped(self, cuts: Sequence[tuple[int, ...]]) -> list[Group[L]]:
        groups = []
        for members in cuts:
            part = self.layout.part(members)
            groups.append(Group(members, part, self._make_accumulator(part), self.options.scheme("")))
        self._describe(groups)
        return groups

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
        changed = density != self.options.density
        self.options = self.options.with_density(density)
        self._describe(self.groups)
        if changed:
            self._restart_trial()

    def read_residual(self) -> Values:
        """A copy of this rank's residual: NumPy, shape (n,), in the layout's order."""
        return read_residual(self.groups, self.layout)

    def record(self) -> Record:
        """This rank's residual (a copy, NumPy) and counters, as `load` takes them."""
        states = [{"members": list(group.members), **group.algorithm.state()} for group in self.groups]
        state = {"step": max(group["step"] for group in states), "groups": states}
        return record(*self.network.membership(), self.read_residual(), self.residual_scale, state)

    def load(self, records: Sequence[Record]) -> None:
        """Takes this rank's share of the records that `record` gave on these or other ranks; none starts anew."""
        self.take(share_of(records, *self.network.membership(), self.layout, process=THIS_PROCESS))

    def take(self, share: Record) -> None:
        """Takes what `share_of` has worked out for this rank; a trial begins anew."""
        self._restart_trial()
        self._take(share)

    def _take(self, share: Record) -> None:
        state = share["algorithm"]
        same = {tuple(group["members"]): group for group in state.get("groups", ())}
        for group in self.groups:
            group.algorithm.forget()
            group.algorithm.step = state["step"]
            if group.members in same:
                group.algorithm.load_state(same[group.members])
        self.residual_scale = share["residual_scale"]
        load_residual(self.groups, self.layout, share["residual"])

    @property
    def has_lanes(self) -> bool:
        """Whether the network lets several reductions run at the same time; known after the first step."""
        return self._transport is not None and self._transport.has_lanes

    @property
    def description(self) -> str:
        """What must be equal on all ranks, as the first group's roll call has it."""
        return self.groups[0].algorithm.description

    def _describe(self, groups: Sequence[Group[L]]) -> None:
        for number, group in enumerate(groups, 1):
            names = ", ".join(name for name, *_ in group.layout.entries)
            which = [f"group {number} of {len(groups)}: {names}"] if len(groups) > 1 else []
            group.algorithm.description = self._description([*self._lines, *which])

    def _description(self, lines: Sequence[str]) -> str:
        settings = [f"{name}: {value}" for name, value in self.options.settings().items()]
        return "\n".join([f"compression: {type(self.options).__name__}", *settings,
                          f"op: {'Average' if self._average else 'Sum'}", *lines])

    def connect(self) -> CountingTransport:
        """The transport; a new one where elastic training has changed who the ranks are."""
        membership = self.network.membership()
        if self._transport is None or membership != self._membership:
            if self._transport is not None:
                for group in self.groups:
                    group.algorithm.forget()
            self._transport = CountingTransport(self.network.connect(self.options.transport))
            self._membership = membership
            if (self._transport.rank, self._transport.size) != membership:
                raise TransportError(f"Horovod calls this rank {membership[0]} of {membership[1]}; the transport "
                                     f"calls it {self._transport.rank} of {self._transport.size}")
        return self._transport

    def meet(self, description: str) -> None:
        """A roll call alone."""
        assert self._transport is not None
        first = self.groups[0]
        k = self.options.k_of(first.layout.n) if first.layout.n else 0
        roll_call(self._transport, description, k, first.algorithm.step, finite=True, state=0,
                  counts=np.zeros(self._transport.size, np.int64))

"""The reduction of one model's gradients, step after step: the part that every integration has in common."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

from ..errors import PluginError
from ..schemes.options import Scheme
from ..selection.accumulator import ResidualAccumulator
from ..state.records import Record
from ..transport.ranks import Ranks
from ..vectors.layout import Layout
from ..vectors.sparse import Values
from .gradient_reduction import GradientReduction
from .gradients import ReducedGradients
from .mode import Channel, Mode

logger = logging.getLogger("horovod_oktopk")

TOO_LARGE = ("the gradients are finite, and their sum with what was not sent before is too large for their dtype: "
             "this step is skipped on all ranks, and so are those that follow while it does not fit. Use float32 or "
             "bfloat16 gradients, or divide the loss")


class GradientMode(Mode[ReducedGradients]):
    """Gradients that are replaced by their sum or mean before the optimizer's own step.

    The arguments are GradientReduction's; `signature` defaults to the layout's description.
    """

    reduction: GradientReduction
    refused: ClassVar[Mapping[str, str]] = {
        "zero_rows": "Keras' Adafactor makes weights NaN if a row and a column of a gradient are all zeros, as in "
                     "sparse updates: give Adafactor(epsilon_1={least:g}); got epsilon_1={got:g}"}

    def __init__(self, options: Scheme, average: bool, layout: Layout,
                 make_accumulator: Callable[[], ResidualAccumulator], ranks: Ranks,
                 signature: Sequence[str] | None = None) -> None:
        signature = layout.describe() if signature is None else signature
        reduction = GradientReduction(options, average, layout, make_accumulator, ranks, type(options).__name__,
                                      signature)
        super().__init__(reduction, reduction.residuals)
        self._has_told = False

    def reduce(self, gradients: ReducedGradients, others_finite: bool = True) -> None:
        reduction, accumulator = self.reduction, self.reduction.accumulator
        reduction.connect()
        if reduction.is_alone and not reduction.may_hold_residual:
            finite = gradients.all_finite() and others_finite
            reduction.memory, reduction.report = reduction.step_alone(finite)
            return
        transport, said = reduction.open(), reduction.attendance()
        reduction.worker.agree(said)
        with transport.phase("accumulate"):
            finite = accumulator.accumulate(gradients.pieces(), clear=gradients.clearable)
        outcome = reduction.outcome(accumulator, replace(said, finite=finite and others_finite))
        reduction.note(outcome)
        with reduction.writing(outcome.report):
            update = reduction.committed(outcome, accumulator.commit)
            gradients.write(update, gradients.clearable)
        if update is None and outcome.result is not None and transport.rank == 0 and not self._has_told:
            self._has_told = True
            logger.warning(TOO_LARGE)

    @classmethod
    def channel(cls, options: Any) -> Channel:  # noqa: ARG003
        return Channel(own=False, yields=False)

    def begin(self, gradients: ReducedGradients, settings: Sequence[float] = (), scaled: bool = False) -> int:  # noqa: ARG002
        return 0 if scaled and self.report is not None and not self.report.finite else 1

    def refuse_step(self, message: str, signature: Sequence[str] | None = None) -> NoReturn:
        reduction = self.reduction
        reduction.connect()
        signature = [*reduction.layout.describe(), message] if signature is None else signature
        reduction.check_agreement(reduction.described(reduction.scheme, signature))
        raise PluginError(message)

    def read_residual(self) -> Values:
        """Return a copy of this rank's residual: NumPy, shape (n,), in the layout's order."""
        return self.reduction.accumulator.read_residual()

    def records(self) -> list[Record]:
        return [self.reduction.record(self.read_residual())]

    def restore(self, record: Record) -> None:
        self.reduction.restore(record)

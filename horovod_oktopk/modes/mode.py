"""A Mode: the exchange around the steps of one optimizer. Integrations know no other interface of a reduction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn

from ..errors import PluginError
from ..phases.agreement import instead
from ..schemes.report import StepReport
from ..state.records import Stateful
from ..transport.counting import CountingTransport
from ..vectors.sparse import DenseVector, Indices, Layout, SparseVector, Values
from .reduction import Reduction

Update = SparseVector | DenseVector
Piece = tuple[int, Any]
"""An offset and a flat array on the accumulator's device."""


class Gradients(ABC):
    """This rank's gradients of one step, as the flat vector of a layout.

    Gradients that stay this rank's own have no `pieces` and no `write`.
    clearable: False if the pieces must not be written.
    """

    clearable: ClassVar[bool] = True

    def pieces(self) -> Iterable[Piece]:
        """Return the gradients. If they are clearable, the caller leaves zeros in a piece of the layout's dtype."""
        raise NotImplementedError

    def write(self, update: Update | None, cleared: bool) -> None:
        """Write an update over the gradients; NaN for None. cleared: contiguous pieces hold zeros."""
        raise NotImplementedError

    @abstractmethod
    def elements(self, places: Indices) -> Values:
        """Return the elements at these places of the flat vector, in its order."""

    @abstractmethod
    def all_finite(self) -> bool:
        """Return True if all elements are finite."""


class Mode(Stateful):
    """The exchange of one optimizer's results, around its steps, on this rank.

    A step, on all ranks alike:

        for _ in range(mode.begin(gradients, settings)):
            settings = mode.prepare(gradients)
            the optimizer's own step, with these settings, with coefficient · gain times its learning rate, and with
            1/gain of its decoupled weight decay
        mode.end()

    Gradients are in true units: a program that scales a loss divides before. Methods that communicate raise
    AgreementError or TransportError, on all ranks.

    acts_at_step: gradients stay this rank's own until `begin`; otherwise `reduce` comes before it.
    reads_memory: parameters are read as they lie in memory.
    refused: features that a program must not use, and the advice.
    """

    acts_at_step: ClassVar[bool] = True
    reads_memory: ClassVar[bool] = False
    has_rounds: ClassVar[bool] = False
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

    def __init__(self, layout: Layout, reduction: Reduction) -> None:
        self.layout, self.ranks = layout, reduction.ranks
        self.reduction = reduction

    @property
    def report(self) -> StepReport | None:
        """The report of the last step; None before the first."""
        return self.reduction.report

    def reduce(self, gradients: Gradients, others_finite: bool = True) -> None:
        """Replace the gradients by their mean or sum over the ranks; by NaN if one is not finite on some rank.

        others_finite: False if anything that this rank reduces by other means in this step (sparse gradients) is not
        finite.
        """

    @abstractmethod
    def begin(self, gradients: Gradients, settings: Sequence[float] = (), scaled: bool = False) -> int:
        """Return how many steps of the optimizer follow.

        settings: hyperparameters that travel with the gradients. scaled: True if a loss scaler takes the step; then
        none follows if a gradient was not finite.
        """

    def prepare(self, gradients: Gradients) -> Sequence[float]:  # noqa: ARG002
        """Write the gradients of the optimizer's next step; return its hyperparameters, if they are not its own."""
        return ()

    def end(self) -> None:
        """Finish a step."""

    def synchronize(self, for_good: bool = False) -> Iterator[int]:  # noqa: ARG002
        """Yield how many steps of the optimizer follow, until all ranks have seen the same rounds. Collective.

        for_good: this rank takes no more steps, and `close` follows.
        """
        return iter(())

    def close(self) -> None:
        """End what the mode has under way, after the last step."""

    @classmethod
    def check(cls, feature: str) -> None:
        """Raise PluginError, with advice, if a program must not use this feature."""
        if feature in cls.refused:
            raise PluginError(cls.refused[feature])

    def belongs_to(self, owner: object) -> None:
        """End everything that would outlive the owner when the owner is gone. The owner holds this object."""

    @abstractmethod
    def refuse_step(self, message: str, signature: Sequence[str] | None = None) -> NoReturn:
        """Raise PluginError for a step that cannot be taken; the ranks that do take it raise AgreementError.

        signature: lines on the gradients at hand; by default those of the layout, and the message.
        """

    @property
    def description(self) -> str:
        return self.reduction.description

    def connect(self) -> CountingTransport:
        return self.reduction.connect()

    def check_agreement(self, description: str) -> bool:
        return self.reduction.check_agreement(description)

    def meet(self, doing: str) -> None:
        """Meet the other ranks for something together. Collective. If one takes a step instead, all get an error."""
        self.connect()
        self.check_agreement(instead(self.description, doing))

    def set_density(self, density: float | None) -> None:
        """Select another fraction of the elements from the next step on; None: that of the options again.

        Raise OptionError for a density that is not allowed.
        """
        self.reduction.scheme = self.reduction.scheme.with_density(density)

    def shared(self) -> AbstractContextManager[None]:
        """Return a context in which the model holds the parameters that all ranks share."""
        return nullcontext()

    def suspend(self) -> None:
        """Put the parameters that all ranks share into the model, until the next step begins anew."""

    def resume(self) -> None:
        """Continue, before the next step, with a state that was loaded."""

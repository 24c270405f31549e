"""A Mode: the exchange around the steps of one optimizer. Integrations know no other interface of a reduction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, TypeVar

from ..errors import PluginError
from ..phases.agreement import NOW
from ..schemes.report import StepReport
from ..state.records import THIS_PROCESS, Record, Residuals
from ..transport.counting import CountingTransport
from .gradients import Gradients
from .reduction import Reduction

Theirs = TypeVar("Theirs", bound=Gradients)
"""The gradients that a mode works on."""


class Channel(NamedTuple):
    """The needs of a mode's messages: to travel beside others', and to leave the processor to the program."""

    own: bool
    yields: bool


class Mode(ABC, Generic[Theirs]):
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

    def __init__(self, reduction: Reduction, residuals: Residuals) -> None:
        self.reduction, self.residuals = reduction, residuals

    @property
    def report(self) -> StepReport | None:
        """Report of the last step; None before the first."""
        return self.reduction.report

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

    def catch_up(self) -> None:
        """Apply what the last step has begun to exchange, if the next step would do it only; on this rank alone."""

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
        self.reduction.set_density(density)

    def shared(self) -> AbstractContextManager[None]:
        """Return a context in which the model holds the parameters that all ranks share."""
        return nullcontext()

    def suspend(self, for_another: bool = False) -> None:
        """Put the parameters that all ranks share into the model, until the next step begins anew.

        `for_another` tells that another optimizer may move them in between.
        """

    def resume(self, make_way: Callable[[], None] = lambda: None) -> None:
        """Continue, before the next step, with a state that was loaded or suspended.

        Do nothing if another optimizer has trained the parameters since. `make_way` is called before the parameters
        become this rank's own.
        """

    # Outside of a step.

    @contextmanager
    def meeting(self, doing: str) -> Iterator[CountingTransport]:
        """Hold a roll call with the other ranks, and give the block the transport to them. Collective.

        `doing` names it in words. All ranks raise AgreementError if one takes a step or does something else, and
        would wait in vain.
        """
        transport = self.reduction.connect()
        self.reduction.check_agreement(f"{self.reduction.description}\n{NOW}{doing}")
        yield transport

    def announce(self, doing: str) -> None:
        """Tell the other ranks what this one does in place of a step, and do nothing more. Collective."""
        with self.meeting(doing):
            pass

    @abstractmethod
    def records(self) -> list[Record]:
        """Return this rank's residual (a copy, NumPy) and counters in one record; none before the first step."""

    def load(self, records: Sequence[Record]) -> None:
        """Load this rank's part of the records that `records` returned on these or other ranks; none starts anew.

        If residuals are moves of parameters, the model is to hold the parameters that were shared by then.
        """
        self.restore(self.part_of(records))

    def part_of(self, records: Sequence[Record]) -> Record:
        """Return this rank's part of the records, for `restore`. Raise OptionError if they do not fit."""
        rank, size, _ = self.reduction.ranks.membership()
        return self.residuals.part_of(records, rank, size, process=THIS_PROCESS)

    @abstractmethod
    def restore(self, record: Record) -> None:
        """Restore this rank's record of a saved state, as `Residuals.part_of` returned it."""

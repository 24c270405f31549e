"""Step-ahead error feedback, step after step: the part that every integration has in common.

Invariant: the residual of this rank is w - p, and is stored nowhere. w has the same bits on all ranks. A step:

    begin       the exchange under way is applied: w -= u / (λP); p += c - u / (λP), where c is this rank's
                contribution to u. So w - p is the new residual again. A few elements of the gradient are read: the
                ranks' own noise gives the gain.
    (the optimizer's own local step on p, with λ · gain times its learning rate)
    end         acc = w - p is read, and its top k are selected; u = Topk(Σ Topk(acc)) is under way. Until it
                is applied, p has moved by (1 - 1/λ) times the selected values: to the place where the exchange
                would take it, if all ranks had selected the same.

While an exchange is under way only the program itself moves p: whatever it does to p is a local step.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, NoReturn

import numpy as np

from ...errors import NonFiniteError, PluginError
from ...schemes.algorithm import Algorithm
from ...schemes.base import Scheme, Unit
from ...schemes.report import StepReport, sum_of_phases
from ...selection.parameter_accumulator import ParameterAccumulator
from ...state.records import THIS_PROCESS, Record, check_residuals, record, share_of
from ...transport.base import Transport, broadcast
from ...transport.counting import CountingTransport
from ...transport.hosts import ranks_per_host
from ...transport.ranks import Ranks
from ...vectors.layout import L
from ...vectors.sparse import SparseVector
from ..connection import Connection
from ..mode import Gradients, Mode
from .completion import complete, whole
from .exchange import Exchange
from .hosts import HostMember
from .noise import SUMS, GradientNoise, nothing, sample
from .options import StepAhead
from .replica import Replica

logger = logging.getLogger("horovod_oktopk")

BROADCAST_FIRST = ("the parameters, which must be the same everywhere before the first step "
                   "(hvd.broadcast_parameters; in Keras BroadcastGlobalVariablesCallback, and a model that is "
                   "built), and whenever shared_parameters ends")
NARROW = ("StepAhead needs float32 or float64 parameters; '{name}' has {dtype}. What a rank has not sent yet would "
          "be lost to rounding: keep float32 parameters, and compute in 16 bits (torch.autocast; in Keras the policy "
          "mixed_float16 or mixed_bfloat16)")
SEVERAL = ("StepAhead needs parameters of one dtype; '{name}' has {dtype}, and '{first[0]}' has {first[2]}: convert "
           "the model, or make two optimizers")
OTHER_PARAMETERS = ("the model holds other parameters than those that all ranks shared when this state was saved, so "
                    "what this rank had not sent then is dropped: save the model inside shared_parameters(optimizer)")
INSIDE = ("a step inside shared_parameters: the model holds what all ranks share there, to be evaluated and saved; "
          "leave it before the next step")
ADOPTED = "rank %d has taken rank 0's parameters at its first step, in place of a step of its own"
SKIPPED = "the gradients of rank %d are not finite, so it takes no step of its own"
NOT_FINITE = ("the parameters of ranks {ranks} are not finite after their own step, though their gradients were. "
              "Training has diverged: try a lower learning rate. The shared parameters are intact: "
              "shared_parameters(optimizer)")
OVERFLOW = ("the ranks' moves are finite, and their sum is not: training has diverged. The shared parameters are "
            "intact: shared_parameters(optimizer)")
NEVER_SHARED = ("shared_parameters was never entered: wherever the model was evaluated or saved, it held this rank's "
                "own parameters, and not those that all ranks share. Write: with shared_parameters(optimizer): ...")
LAST_EXCHANGE = 60.0
"""Seconds for which a rank that shuts Horovod down waits for the exchange under way."""


class StepAheadMode(Mode, Generic[L]):
    """The shared parameters w of one model, and the exchanges of w - p; one object on each rank.

    average: True if the ranks' moves are averaged, False if summed. accumulator: holds w.
    normalizes: True if the optimizer normalizes its gradients, as Adam does.
    Raise PluginError for parameters in 16 bits, or of several dtypes.
    """

    reads_memory = True
    refused: ClassVar[Mapping[str, str]] = {
        "local": "a local variable cannot be used with StepAhead, which shares all of the optimizer's: give local "
                 "layers an optimizer of their own"}
    unit: Unit = "parameters"
    layout: L

    def __init__(self, options: StepAhead, average: bool, layout: L, accumulator: ParameterAccumulator,
                 replica: Replica, ranks: Ranks, normalizes: bool = False) -> None:
        for name, _, dtype in layout.entries:
            if dtype not in ("float32", "float64"):
                raise PluginError(NARROW.format(name=name, dtype=dtype))
            if dtype != layout.entries[0][2]:
                raise PluginError(SEVERAL.format(name=name, dtype=dtype, first=layout.entries[0]))
        self.options = options
        self.layout = layout
        self.ranks = ranks
        self.report: StepReport | None = None
        self.is_started = self.is_swapped = self._has_agreed = self._was_shared = False
        self._digest = ""  # of w at the start
        self._average = average
        self._accumulator = accumulator
        self._replica = replica
        self._scheme: Scheme = options.scheme
        self._described: Scheme | None = None
        self._algorithm: Algorithm = self._scheme.algorithm(self.unit)
        self._algorithm.samples = SUMS
        self._connection = Connection(ranks, self._scheme.transport, self._scheme.hierarchical, self._subject)
        self._rank, self._ahead = 0, 0.0  # and λ, since the last start
        self._steps = 0  # of the optimizer, since the last exchange began
        self._exchange = Exchange()
        self._anticipated: SparseVector | None = None  # what p goes back by before it is applied
        self._member = HostMember(accumulator)
        self._normalizes = normalizes
        self._noise = GradientNoise()
        self._sample = nothing()  # of this step's gradient
        self._was_loaded = self._is_suspended = False
        self._share: Record | None = None  # of a state that was loaded, for the next start
        _live.add(self)

    # A step.

    def begin(self, gradients: Gradients, settings: Sequence[float] = (), scaled: bool = False) -> int:  # noqa: ARG002
        """Return 1; or 0 if this rank's gradients are not finite, and it joins the exchange without a local step.

        Raise the error of the exchange under way, if any.
        """
        if self.is_swapped:
            raise PluginError(INSIDE)
        if self._connection.lost():
            self._start_anew()
        if not self.is_started:
            self.start()
        has_adopted = not self._has_agreed and self._agree()
        self._sample = nothing()
        if self._is_due:
            self.catch_up()
        if has_adopted:
            logger.info(ADOPTED, self._rank)
            return 0
        if not gradients.all_finite():
            logger.warning(SKIPPED, self._rank)
            return 0
        if self._is_due and self.layout.n and self._workers > 1:
            self._sample = sample(gradients.elements, self.layout.n, self._algorithm.step)
        return 1

    def end(self) -> None:
        """Begin an exchange after the local step, if one is due."""
        if not self._is_due:
            self._steps += 1
            return
        self._steps = 0
        self._begin_exchange()
        if not self.options.overlap:
            self.catch_up()

    @property
    def holds_own(self) -> bool:  # type: ignore[override]
        return self.is_started and not self.is_swapped

    @property
    def must_begin_anew(self) -> bool:  # type: ignore[override]
        return not self.is_started

    def refuse_step(self, message: str, signature: Sequence[str] | None = None) -> NoReturn:  # noqa: ARG002
        """Raise PluginError; if the other ranks do not refuse as well, all raise AgreementError.

        The exchange under way is awaited, but not applied.
        """
        self._exchange.wait()
        if self._connection.is_current:
            self.check_agreement(f"{self.description}\n{message}")
        raise PluginError(message)

    def catch_up(self) -> None:
        """Wait for the exchange under way, and apply it; on this rank alone.

        Raise AgreementError, NonFiniteError or TransportError if the exchange did.
        """
        if self._exchange.is_under_way:
            try:
                outcome = self._exchange.end()
            finally:
                self._take_back()
            if outcome.measured is not None:
                self._noise.take(outcome.measured)
            self.report = report = outcome.result.report
            report.gain, report.noise_ratio, report.noise_scale = self.gain, self._noise.ratio, self._noise.scale
            if outcome.result.update is None:
                raise NonFiniteError(NOT_FINITE.format(ranks=list(outcome.result.not_finite)))
            if outcome.update is None or outcome.change is None:  # on all ranks alike
                raise NonFiniteError(OVERFLOW)
            with self._reported("write_back"):  # what contributed leaves the residual, what rounding left over stays
                self._accumulator.commit(outcome.update)
                self._replica.add(outcome.change)

    def _begin_exchange(self) -> None:
        transport, algorithm = self._connection.transport, self._algorithm
        transport.reset()
        if self._scheme is not self._described:  # the roll call under way had the old description
            algorithm.description, self._described = self.description, self._scheme
        acc, finite, all_finite = self._look(transport)
        step = algorithm.begin(acc, self._k, finite, transport, whole=self.layout.n)
        step.sample = self._sample
        acc.release()
        if all_finite:
            algorithm.select_together(step)
            if self.options.overlap:
                self._anticipate(whole(step.selected, transport.hosts, self.layout.n))
        self._exchange.begin(functools.partial(complete, algorithm, step, self._divisor),
                             at_once=not transport.concurrent)

    def _look(self, transport: CountingTransport) -> tuple[ParameterAccumulator, bool, bool]:
        """Return this rank's part of w - p; True if the part is finite; True if all of the host's parts are.

        Only the accumulator holds the parameters' memory afterwards, until the accumulator is released.
        """
        pieces = self._replica.pieces()
        acc, own = self._member.share_of(pieces, transport.hosts)
        with transport.phase("accumulate"):
            finite = acc.accumulate(own)
        all_finite = self._algorithm.agree_on_host(self._k, transport, finite=finite)
        self._member.check_alike(pieces, self._algorithm, self._k, transport)
        return acc, finite, all_finite

    def _anticipate(self, selected: SparseVector) -> None:
        """Move p, until the exchange is applied, as if all ranks had selected the same as this one.

        A local step moves p by only a fraction λ (`coefficient`) of the optimizer's step; the exchange adds the rest.
        If the rest arrived one step late, then with large learning rates and momentum the gradients would be computed
        at stale parameters. selected = w - p at the selected elements, which is λ of a step already.
        """
        if self.coefficient < 1:
            factor = selected.values.dtype.type(1 / self.coefficient - 1)
            self._anticipated = SparseVector(selected.indices, factor * selected.values)
            self._replica.add(SparseVector(selected.indices, -self._anticipated.values))

    def _take_back(self) -> None:
        if self._anticipated is not None:
            self._replica.add(self._anticipated)
            self._anticipated = None

    @property
    def last_report(self) -> StepReport | None:
        """Report of the last applied exchange; None before the first."""
        return self.report

    @property
    def _divisor(self) -> float:
        size = self._connection.transport.size
        return self.coefficient * (size if self._average else 1)

    @contextmanager
    def _reported(self, phase: str) -> Iterator[None]:
        transport = self._connection.transport
        transport.reset()
        with transport.phase(phase):
            yield
        assert self.report is not None
        self.report.phases = sum_of_phases([self.report.phases, transport.phases])

    # The beginning, and new ones.

    def start(self) -> None:
        """Take the model's parameters as w; if a state was loaded, set p to w - residual. On this rank alone."""
        self._accumulator.start(self._replica.pieces())
        self._digest = self._digest_of_shared()
        self._rank, self._ahead, self._steps = self.ranks.membership()[0], self.coefficient, 0
        self.is_started, self._has_agreed, self._member.copies = True, False, self.copies
        share, self._share, self._is_suspended = self._share, None, False
        self._was_loaded = share is not None
        if share is not None:
            self._take(share, self._digest)

    def _agree(self) -> bool:
        """Check that the shared parameters w and the options are the same on all ranks. Collective.

        Rank 0's statistics for the gain become those of all ranks. Return True if this rank has adopted rank 0's
        parameters.
        """
        adopts, self.adopts = self.adopts, False
        said = self.description if adopts else f"{self.description}\n{BROADCAST_FIRST}: {self._digest}"
        is_new = not self._connection.is_current
        transport = self._connection.connect(said, self._k)
        if not is_new:
            self._algorithm.check_agreement(said, self._k, transport)
        has_adopted = adopts and self._adopt(transport.everyone)
        self._has_agreed = True
        self._noise.become_alike(transport.everyone, self._workers)
        if transport.hosts is not None:
            self._member.become_alike(self._replica, transport.hosts, self.adds, self._was_loaded)
        self._was_loaded = False
        return has_adopted

    def _adopt(self, transport: Transport) -> bool:
        """Take rank 0's parameters if a rank has others. Collective. Return True if this rank had others."""
        digests = transport.allgather(np.frombuffer(bytes.fromhex(self._digest), np.int64))[:, 0]
        if (digests == digests[0]).all():
            return False
        mine = self._accumulator.read_shared()
        first = broadcast(mine, transport)
        if digests[transport.rank] == digests[0]:
            return False
        self._replica.assign(first)
        self.start()
        return True

    def _take(self, share: Record, digest: str) -> None:
        if share["shared"] not in (None, digest):
            warnings.warn(OTHER_PARAMETERS, stacklevel=2)
            return
        self._algorithm.forget()
        self._algorithm.step = share["algorithm"]["step"]
        if "own" in share["algorithm"]:  # not of another number of ranks
            self._algorithm.load_state(share["algorithm"]["own"])
        self._steps, self._member.copies = share["steps"], share["copies"]
        if share["noise"] is not None:
            self._noise.load_state(share["noise"])
        residual, saved = share["residual"], share["residual_scale"]
        if saved and saved != self._ahead:
            residual = residual * residual.dtype.type(self._ahead / saved)
        self._replica.assign(self._accumulator.minus(self._replica.in_memory(residual)))

    def _checksum(self) -> int:
        """Return a number that almost certainly differs if w does; faster than a digest."""
        return zlib.crc32(np.ascontiguousarray(self._accumulator.read_shared()).view(np.uint8).data)

    def _digest_of_shared(self) -> str:
        """Return a short text that differs if one bit of w does."""
        values = np.ascontiguousarray(self._replica.logical(self._accumulator.read_shared()))
        return hashlib.blake2b(values.view(np.uint8).data, digest_size=8).hexdigest()

    def suspend(self) -> None:
        """Put w into the model until the next step begins anew; keep what this rank has not sent."""
        if self.is_started:
            share = self.record()
            if not self.is_swapped:
                self._swap()
            self.is_started = self.is_swapped = False
            self._share, self._is_suspended = share, True

    def _start_anew(self) -> None:
        """Drop the exchange under way, as the ranks have changed; begin anew at the next step."""
        self._exchange.drop()
        self._take_back()
        self.suspend()
        self._algorithm.forget()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Put w into the model inside the block, to be read; restore this rank's own parameters afterwards.

        A state may be loaded inside, and the model's w with it: then p is w - residual at the end. If the program
        changes w inside, it must do so on all ranks alike. The next step checks this.
        """
        self._was_shared = True
        if self.is_swapped:
            yield
            return
        waiting, before = self._share, 0
        if self.is_started:
            self.catch_up()
            before = self._checksum()
            self._swap()
        try:
            yield
        finally:
            if self.is_swapped and not sys.is_finalizing():  # if it was left open, its tensors may be gone by then
                self._swap()
                if self._checksum() != before:
                    self._digest, self._has_agreed = self._digest_of_shared(), False
        if self._share is not waiting and not self._is_suspended:
            self.resume()

    def resume(self) -> None:
        """Continue from a suspended or loaded state before the next step: the model holds p = w - residual again."""
        if self._share is not None:
            self.start()

    def _swap(self) -> None:
        self._replica.swap(self._accumulator.shared)
        self.is_swapped = not self.is_swapped

    # The state.

    def record(self) -> Record | None:
        """Return this rank's residual w - p (NumPy) and counters, for `load`; None before the first step.

        The exchange under way is applied, and p becomes w - residual, as it will be after loading. So a resumed run
        has the same bits.
        """
        if not self.is_started:
            return self._share
        was_swapped = self.is_swapped
        if was_swapped:
            self._swap()
        self.catch_up()
        self._accumulator.accumulate(self._replica.pieces())
        residual = self._accumulator.values()
        self._accumulator.release()
        self._replica.assign(self._accumulator.minus(residual))
        digest = self._digest_of_shared()
        if was_swapped:
            self._swap()
        own = record(*self.ranks.membership()[:2], self.layout, self._replica.logical(residual), self._ahead,
                     {"step": self._algorithm.step, "own": self._algorithm.state()}, self.unit, self._member.copies)
        return {**own, "shared": digest, "steps": self._steps, "noise": self._noise.state()}

    def load(self, records: Sequence[Record]) -> None:
        """Load this rank's share of the records that `record` returned on these or other ranks; none starts anew.

        The model is to hold w by then: the parameters that were shared when the state was saved.
        """
        check_residuals(records)
        self.take(share_of(records, *self.ranks.membership()[:2], self.layout, process=THIS_PROCESS,
                           unit=self.unit, copies=self.copies, adds=self.adds))

    def take(self, share: Record) -> None:
        """Take the result of `share_of` for this rank; used when `shared` ends or the next step begins.

        The exchange under way is awaited and dropped: the state is of another step.
        """
        self._exchange.drop()
        self._anticipated = None
        self.is_started = self.is_swapped = self._is_suspended = False
        self._share = {"shared": None, "steps": 0, "copies": 1, "noise": None, **share}

    # The ranks, for other ends than a step: what a checkpoint in one file needs.

    def connect(self) -> CountingTransport:
        """Return the transport to all ranks, after applying the exchange under way. Collective."""
        self.catch_up()
        if self._connection.lost():
            self._start_anew()
        return self._connection.connect(self.description, self._k).everyone

    def check_agreement(self, description: str) -> bool:
        """Hold a roll call alone, after `connect`. Collective."""
        return self._algorithm.check_agreement(description, self._k, self._connection.transport)

    # What must be equal on all ranks.

    @property
    def coefficient(self) -> float:  # type: ignore[override]
        """λ: the factor for the optimizer's learning rate."""
        return self.options.coefficient(self._workers, self._normalizes)

    @property
    def gain(self) -> float:  # type: ignore[override]
        """A further factor on the optimizer's steps, but not on those of decoupled weight decay."""
        if self.options.gain == "auto":
            return math.sqrt(self._noise.ratio) if self._normalizes else 1.0
        return 1.0 if self.options.gain is None else float(self.options.gain)

    @property
    def _workers(self) -> int:
        """Number of workers, which have gradients and parameters of their own."""
        return self.ranks.membership()[1] // self.copies

    @property
    def _is_due(self) -> bool:
        """True if an exchange begins at the end of this step."""
        return self._steps + 1 >= self.options.local_steps

    @property
    def adds(self) -> bool:  # type: ignore[override]
        """True if workers' moves are added up."""
        return not self._average

    @property
    def copies(self) -> int:  # type: ignore[override]
        """Number of ranks of a worker, which have the same residual."""
        return ranks_per_host(self.ranks, self._scheme.hierarchical)

    @property
    def _k(self) -> int:
        return self._scheme.k_of(self.layout.n) if self.layout.n else 0

    def _subject(self) -> str:
        gain = "measured" if self.options.gain == "auto" and self._normalizes else f"{self.gain:g}"
        return f"StepAhead({type(self._scheme).__name__}), gain {gain}: {self.layout.summary(self._k)}"

    @property
    def description(self) -> str:
        """Options and layout, as one "name: value" a line."""
        options = {**self.options.settings(), **self._scheme.settings(self.unit)}
        return "\n".join([f"compression: StepAhead({type(self._scheme).__name__})",
                          *(f"{name}: {value}" for name, value in options.items()),
                          f"optimizer: normalizes its gradients: {self._normalizes}",
                          f"op: {'Average' if self._average else 'Sum'}", *self.layout.describe()])

    def set_density(self, density: float | None) -> None:
        """Set the density from the next exchange on; see GradientMode.set_density."""
        self._scheme = self._scheme.with_density(density)

    def close(self) -> None:
        self.finish()

    def finish(self) -> None:
        """Wait for the exchange under way, and leave it; call this before Horovod is shut down."""
        self._exchange.wait(LAST_EXCHANGE)
        if self.is_started and self.report is not None and not self._was_shared and self._rank == 0:
            self._was_shared = True  # told once
            logger.warning(NEVER_SHARED)


_live: weakref.WeakSet[StepAheadMode[Any]] = weakref.WeakSet()


def finish_before(shutdown: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Horovod's shutdown, so that this process's exchanges end first."""
    @functools.wraps(shutdown)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for reducer in list(_live):
            reducer.finish()
        return shutdown(*args, **kwargs)

    return wrapped

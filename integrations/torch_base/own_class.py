"""The class of a distributed optimizer, which is the user's own object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.torch_base.private import SCHEDULED, SUPPORTS_SCALING
from horovod_oktopk.torch_base.registry import run_of
from horovod_oktopk.torch_base.run import Run
from horovod_oktopk.torch_base.state import loader_of

COPIED = ("a copy of a distributed optimizer is not distributed: give it to DistributedOptimizer(optimizer, "
          "named_parameters=..., compression=...), with the copied model's names, before its first step")
PLAIN = "_oktopk_plain"
"""An attribute of a distributed optimizer's class: the class that it had before."""


class _Distributed(torch.optim.Optimizer):
    """The members that the class of a distributed optimizer has beside those of the plain class.

    They are copied there, as Horovod asks the next class for the plain step; see `_step_for_the_state`.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a distributed step. A closure is evaluated once, before it, and its loss is returned."""
        run = _run(self)
        if closure is None:
            return run.step()
        run.kind.check("closure")
        with torch.enable_grad():
            loss = closure()
        run.step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # else PyTorch would wrap it again, and run users' hooks twice

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Clear the gradients. Warn a program that does so again and again, and never takes a step."""
        run = run_of(self)
        if run is not None:
            run.note_cleared()
        plain_class(type(self)).zero_grad(self, *arguments, **options)  # super() of a wrapper's class leads here

    def load_state_dict(self, state_dict: dict[str, Any], *arguments: Any, **options: Any) -> None:
        """Load a state with the residuals in it: all of it, or nothing if it does not fit."""
        load = loader_of(self, state_dict)
        plain_class(type(self)).load_state_dict(self, state_dict, *arguments, **options)
        load()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what a copy is made of; it takes no steps, as it has no run."""
        return _as_copied, (plain_class(type(self)), type(self).__module__), self.__getstate__()

    def synchronize(self) -> None:
        """Reduce the gradients now, to be clipped; the step follows inside skip_synchronize()."""
        run = _run(self)
        run.kind.check("synchronize")
        if run.ranks.takes_part:
            run.reduce()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Take a step inside without reducing gradients."""
        run = _run(self)
        run.kind.check("synchronize")
        run.reduces = False
        try:
            yield
        finally:
            run.reduces = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accept Horovod's number: a step reduces what all passes before it have added up."""


def _step_for_the_state(self: Any, _closure: Any = None) -> None:
    """Take a plain step for the state that it makes; the parameters stay. The class above the plain one has it.

    hvd.broadcast_optimizer_state calls this, with zero gradients, on ranks that have no state: weight decay would
    move their parameters, and a hook would count a step.
    """
    plain = plain_class(type(self))
    kept = [(p, p.detach().clone()) for group in self.param_groups for p in group["params"]]
    try:
        getattr(plain.step, "__wrapped__", plain.step)(self)
    finally:
        with torch.no_grad():
            for p, value in kept:
                p.copy_(value)


def plain_class(cls: type) -> Any:
    """Return the class that an optimizer had before it was distributed; that of a plain optimizer itself."""
    return getattr(cls, PLAIN, cls)


def class_of(plain: type, module: str, scheduled: bool = False) -> Any:
    """Return a new class for one distributed optimizer, which says that it is of this module.

    `scheduled` says that its step takes the place of one that a scheduler has wrapped, and calls that.
    """
    shared = {"__module__": plain.__module__, PLAIN: plain}
    between = type(plain.__name__, (plain,), {**shared, "step": _step_for_the_state})
    # A new function; it exchanges, and is not to be traced.
    step: Any = torch.compiler.disable(_Distributed.step)  # type: ignore[no-untyped-call]
    if scheduled:
        setattr(step, SCHEDULED, True)
    return type(plain.__name__, (between,), {**shared, **vars(_Distributed), "step": step, "__module__": module,
                                             "__doc__": plain.__doc__, SUPPORTS_SCALING: True})


def _as_copied(plain: type, module: str) -> Any:
    """Return what a copy of a distributed optimizer begins as; its state follows."""
    cls = class_of(plain, module)
    return cls.__new__(cls)


def _run(optimizer: Any) -> Run:
    run = run_of(optimizer)
    if run is None:
        raise PluginError(COPIED)
    return run

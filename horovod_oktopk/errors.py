"""The errors of this package. Each message names the expected value, the given one, and the next thing to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn


class OkTopkError(Exception):
    """Base of all errors of this package."""

    # TensorFlow makes an error that is raised while tracing anew, if its class shows this constructor.
    __init__ = Exception.__init__  # type: ignore[assignment]


class OptionError(OkTopkError, ValueError):
    """An option, or a combination of options, that is not allowed."""


class PluginError(OkTopkError, RuntimeError):
    """A place where the plugin cannot act (not imported, unsupported Horovod, unsupported operation)."""


class AgreementError(OkTopkError, RuntimeError):
    """A difference in options, parameters, shapes or dtypes between the ranks. Raised on all of them."""


class NonFiniteError(OkTopkError, ArithmeticError):
    """Parameters that are NaN or infinite after a local step. Raised on all ranks; the shared ones are intact."""


class TransportError(OkTopkError, RuntimeError):
    """A failure of communication: another rank failed, or did not answer in time."""


class WireError(OkTopkError, ValueError):
    """A received message that is not a valid sparse vector."""


def gone(module: str, advice: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return a module's `__getattr__`, which raises PluginError for earlier versions' names, with the advice."""
    def missing(name: str) -> NoReturn:
        if name in advice:
            raise PluginError(f"{module} has no {name} any more: {advice[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing


NO_DISCARD = {"discard_update": "a step that is not applied loses its update, as with a dense allreduce, and what "
                                "was not sent comes back. Leave the call out"}
"""The advice for a name that all integrations had."""
NO_SCHEDULE = "call set_density(target, warmup_density(epoch, densities)) at the beginning of each epoch"

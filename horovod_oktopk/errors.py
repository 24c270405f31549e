"""The errors of this package. Each message names what was expected, what came, and what to do next."""

from __future__ import annotations


class OkTopkError(Exception):
    """Base of all errors of this package."""

    # TensorFlow makes an error that is raised while tracing anew, if its class shows this constructor.
    __init__ = Exception.__init__  # type: ignore[assignment]


class OptionError(OkTopkError, ValueError):
    """An option, or a combination of options, is outside what is allowed."""


class PluginError(OkTopkError, RuntimeError):
    """The plugin cannot act here (not imported, unsupported Horovod, unsupported operation)."""


class AgreementError(OkTopkError, RuntimeError):
    """The ranks of one reduction differ in options, parameters, shapes or dtypes. Raised on all of them."""


class NonFiniteError(OkTopkError, ArithmeticError):
    """Parameters are NaN or infinite after a local step. Raised on all ranks; what they share is intact."""


class TransportError(OkTopkError, RuntimeError):
    """Communication failed: another rank failed, or did not answer in time."""


class WireError(OkTopkError, ValueError):
    """A received message is not a valid sparse vector."""

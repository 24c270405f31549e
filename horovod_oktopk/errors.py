"""The errors of this package. Each message names the expected value, the given one, and the next thing to do."""


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

"""O(k) sparse gradient allreduce for Horovod. Import `horovod_oktopk.torch` to plug it into horovod.torch."""

from .errors import (
    AgreementError,
    NonFiniteError,
    OkTopkError,
    OptionError,
    PluginError,
    TransportError,
    WireError,
)
from .partial.options import Partial
from .schemes import Dense, GaussianK, GTopk, OkTopk, TopkA, TopkDSA
from .schemes.report import StepReport
from .step_ahead.options import StepAhead

__version__ = "0.1.0"

__all__ = ["AgreementError", "Dense", "GTopk", "GaussianK", "NonFiniteError", "OkTopk", "OkTopkError", "OptionError",
           "Partial", "PluginError", "StepAhead", "StepReport", "TopkA", "TopkDSA", "TransportError", "WireError"]

"""O(k) sparse gradient allreduce for Horovod. Import `horovod_oktopk.torch` to plug it into horovod.torch."""

from .errors import AgreementError, OkTopkError, OptionError, PluginError, TransportError, WireError
from .partial.options import Partial
from .schemes import Dense, GaussianK, GTopk, OkTopk, TopkA, TopkDSA
from .schemes.report import StepReport

__version__ = "0.1.0"

__all__ = ["AgreementError", "Dense", "GTopk", "GaussianK", "OkTopk", "OkTopkError", "OptionError", "Partial",
           "PluginError", "StepReport", "TopkA", "TopkDSA", "TransportError", "WireError"]

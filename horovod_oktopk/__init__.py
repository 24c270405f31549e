"""O(k) sparse gradient allreduce for Horovod. Import `horovod_oktopk.torch` to plug it into horovod.torch."""

from .errors import AgreementError, NonFiniteError, OkTopkError, OptionError, PluginError, TransportError, WireError
from .modes.options import Partial, StepAhead
from .schemes import Dense, GaussianK, GTopk, OkTopk, SameBlocks, TopkA, TopkDSA, warmup_density
from .schemes.report import StepReport

__version__ = "0.1.0"

__all__ = ["AgreementError", "Dense", "GTopk", "GaussianK", "NonFiniteError", "OkTopk", "OkTopkError", "OptionError",
           "Partial", "PluginError", "SameBlocks", "StepAhead", "StepReport", "TopkA", "TopkDSA", "TransportError",
           "WireError", "warmup_density"]

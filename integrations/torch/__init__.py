"""Ok-Topk inside horovod.torch: importing this module makes `compression=OkTopk(...)` work in
`hvd.DistributedOptimizer`, whichever way that was, or will be, imported."""

from ..errors import NO_DISCARD, gone
from ..partial.options import Partial
from ..reducer.checks import what_is_missing
from ..schemes import Dense, GaussianK, GTopk, OkTopk, TopkA, TopkDSA
from ..step_ahead.options import StepAhead

try:
    from . import amp, plugin
except ModuleNotFoundError as error:
    raise what_is_missing(error, __name__, "PyTorch", "HOROVOD_WITH_PYTORCH") from error

from .partial import synchronize_replicas
from .plugin import set_density, step_report
from .schedule import DensitySchedule
from .shared import shared_parameters
from .state import gather_state_dict

plugin.install()
amp.install()
__getattr__ = gone(__name__, NO_DISCARD)

__all__ = [
           "Dense",
           "DensitySchedule",
           "GTopk",
           "GaussianK",
           "OkTopk",
           "Partial",
           "StepAhead",
           "TopkA",
           "TopkDSA",
           "gather_state_dict",
           "set_density",
           "shared_parameters",
           "step_report",
           "synchronize_replicas",
]

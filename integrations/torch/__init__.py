"""Ok-Topk inside horovod.torch: importing this module makes `compression=OkTopk(...)` work in
`hvd.DistributedOptimizer`, whichever way that was, or will be, imported."""

from ..partial.options import Partial
from ..schemes import Dense, GaussianK, GTopk, OkTopk, TopkA, TopkDSA
from . import amp, plugin
from .partial import synchronize_replicas
from .plugin import discard_update, set_density, step_report
from .schedule import DensitySchedule
from .state import gather_state_dict

plugin.install()
amp.install()

__all__ = [
           "Dense",
           "DensitySchedule",
           "GTopk",
           "GaussianK",
           "OkTopk",
           "Partial",
           "TopkA",
           "TopkDSA",
           "discard_update",
           "gather_state_dict",
           "set_density",
           "step_report",
           "synchronize_replicas",
]

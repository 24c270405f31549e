"""Ok-Topk inside horovod.torch: importing this module makes `compression=OkTopk(...)` work in
`hvd.DistributedOptimizer`, whichever way that was, or will be, imported."""

from ..options import Dense, GaussianK, GTopk, OkTopk, TopkA, TopkDSA
from . import amp, plugin
from .plugin import set_density, step_report
from .schedule import DensitySchedule
from .state import gather_state_dict

plugin.install()
amp.install()

__all__ = ["Dense", "DensitySchedule", "GTopk", "GaussianK", "OkTopk", "TopkA", "TopkDSA", "gather_state_dict",
           "set_density", "step_report"]

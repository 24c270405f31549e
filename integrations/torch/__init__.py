"""Ok-Topk inside horovod.torch: importing this module makes `compression=OkTopk(...)` work in
`hvd.DistributedOptimizer`, whichever way that was, or will be, imported."""

from ..options import GaussianK, GTopk, OkTopk, TopkA, TopkDSA
from . import amp, plugin
from .plugin import set_density, step_report
from .state import gather_state_dict

plugin.install()
amp.install()

__all__ = ["GTopk", "GaussianK", "OkTopk", "TopkA", "TopkDSA", "gather_state_dict", "set_density", "step_report"]

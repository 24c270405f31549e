"""Ok-Topk inside horovod.torch.

Importing this module makes `compression=OkTopk(...)` work in `hvd.DistributedOptimizer`.
"""

from horovod_oktopk.modes.api import catch_up, set_density, shared_parameters, step_report, synchronize_replicas
from horovod_oktopk.modes.options import Partial, StepAhead
from horovod_oktopk.schemes import Dense, GaussianK, GTopk, OkTopk, SameBlocks, TopkA, TopkDSA, warmup_density
from horovod_oktopk.transport.horovod import what_is_missing

try:
    from horovod_oktopk.torch import plugin
except ModuleNotFoundError as error:
    raise what_is_missing(error, __name__, "PyTorch", "HOROVOD_WITH_PYTORCH") from error

from horovod_oktopk.torch_base.state import gather_state_dict

plugin.install()

__all__ = ["Dense", "GTopk", "GaussianK", "OkTopk", "Partial", "SameBlocks", "StepAhead", "TopkA", "TopkDSA",
           "catch_up", "gather_state_dict", "set_density", "shared_parameters", "step_report",
           "synchronize_replicas", "warmup_density"]

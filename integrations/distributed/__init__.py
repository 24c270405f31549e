"""Ok-Topk under torchrun: distributed optimizers over torch.distributed, without Horovod and MPI."""

from horovod_oktopk.distributed.ddp import leave_gradients, local_gradients_hook
from horovod_oktopk.distributed.hook import OkTopkState, oktopk_hook
from horovod_oktopk.distributed.optimizer import DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters
from horovod_oktopk.modes.api import catch_up, set_density, shared_parameters, step_report, synchronize_replicas
from horovod_oktopk.modes.options import StepAhead
from horovod_oktopk.schemes import Dense, GaussianK, GTopk, OkTopk, SameBlocks, TopkA, TopkDSA, warmup_density
from horovod_oktopk.torch_base import make
from horovod_oktopk.torch_base.state import gather_state_dict

make.install()

__all__ = ["Dense", "DistributedOptimizer", "GTopk", "GaussianK", "OkTopk", "OkTopkState", "SameBlocks", "StepAhead",
           "TopkA", "TopkDSA", "broadcast_optimizer_state", "broadcast_parameters", "catch_up",
           "gather_state_dict", "leave_gradients", "local_gradients_hook", "oktopk_hook", "set_density",
           "shared_parameters", "step_report", "synchronize_replicas", "warmup_density"]

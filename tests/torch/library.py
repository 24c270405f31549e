"""The library that has started the ranks of this process, Horovod or torchrun, and the plugin for it.

`hvd` has the names of horovod.torch, or as many of them as torch.distributed can serve.
"""

from __future__ import annotations

import os

from horovod_oktopk import Partial

if "TORCHELASTIC_RUN_ID" in os.environ:
    import horovod_oktopk.distributed as plugin
    from tests.distributed.hvd import hvd
else:
    import horovod.torch as hvd

    import horovod_oktopk.torch as plugin

Dense, OkTopk, SameBlocks, StepAhead = plugin.Dense, plugin.OkTopk, plugin.SameBlocks, plugin.StepAhead
gather_state_dict, set_density, shared_parameters = (plugin.gather_state_dict, plugin.set_density,
                                                     plugin.shared_parameters)
catch_up, step_report, synchronize_replicas = plugin.catch_up, plugin.step_report, plugin.synchronize_replicas

__all__ = ["Dense", "OkTopk", "Partial", "SameBlocks", "StepAhead", "catch_up", "gather_state_dict", "hvd",
           "set_density", "shared_parameters", "step_report", "synchronize_replicas"]

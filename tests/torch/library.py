"""The library that has started the ranks of this process, Horovod or torchrun, and the plugin for it.

`hvd` has the names of horovod.torch, or as many of them as torch.distributed can serve.
"""

from __future__ import annotations

import os

if "TORCHELASTIC_RUN_ID" in os.environ:
    from horovod_oktopk import Partial
    from horovod_oktopk.distributed import (
        Dense,
        OkTopk,
        StepAhead,
        gather_state_dict,
        set_density,
        shared_parameters,
        step_report,
        synchronize_replicas,
    )
    from tests.distributed.hvd import hvd
else:
    import horovod.torch as hvd

    from horovod_oktopk.torch import (
        Dense,
        OkTopk,
        Partial,
        StepAhead,
        gather_state_dict,
        set_density,
        shared_parameters,
        step_report,
        synchronize_replicas,
    )

__all__ = ["Dense", "OkTopk", "Partial", "StepAhead", "gather_state_dict", "hvd", "set_density", "shared_parameters",
           "step_report", "synchronize_replicas"]

"""A mode over PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.kinds import make_mode
from horovod_oktopk.modes.mode import Mode
from horovod_oktopk.modes.step_ahead.noise import normalizes
from horovod_oktopk.modes.step_ahead.replica import Replica
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator, ParameterAccumulator
from horovod_oktopk.torch.accumulator import make_accumulator
from horovod_oktopk.torch.layout import TorchLayout
from horovod_oktopk.torch.parameter_accumulator import TorchParameterAccumulator
from horovod_oktopk.torch.replica import TorchHostReplica, TorchReplica, flat_memory
from horovod_oktopk.transport.ranks import Ranks


def mode_of(options: Any, average: bool, layout: TorchLayout, ranks: Ranks, optimizer: type,
            settings: Sequence[str]) -> Mode:
    """Return the mode of an optimizer of this class. settings: names of its hyperparameters."""
    return make_mode(options, average, layout, ranks, make_accumulator, lambda: _parameters(layout),
                     normalizes=normalizes(optimizer), settings=settings)


def _parameters(layout: TorchLayout) -> tuple[ParameterAccumulator, Replica]:
    names = [name for name, *_ in layout.entries]

    def read() -> list[torch.Tensor]:
        message = layout.changed()
        if message is not None:
            raise PluginError(message)
        return [flat_memory(name, p) for name, p in zip(names, layout.parameters, strict=True)]

    if layout.device.type == "cpu":
        return NumpyParameterAccumulator(layout.n, layout.dtype), TorchHostReplica(layout, read)
    return TorchParameterAccumulator(layout.n, layout.dtype, layout.device), TorchReplica(layout, read)

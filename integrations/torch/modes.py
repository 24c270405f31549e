"""The mode of an optimizer's options, over PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from horovod_oktopk.errors import PluginError
from horovod_oktopk.partial.options import Partial
from horovod_oktopk.partial.reducer import PartialReducer
from horovod_oktopk.reducer.flat import FlatReducer
from horovod_oktopk.reducer.mode import Mode
from horovod_oktopk.schemes.base import Scheme
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator
from horovod_oktopk.step_ahead.noise import normalizes
from horovod_oktopk.step_ahead.options import StepAhead
from horovod_oktopk.step_ahead.reducer import StepAheadReducer
from horovod_oktopk.torch.accumulator import make_accumulator
from horovod_oktopk.torch.layout import TorchLayout
from horovod_oktopk.torch.parameter_accumulator import TorchParameterAccumulator
from horovod_oktopk.torch.replica import TorchHostReplica, TorchReplica, flat_memory
from horovod_oktopk.transport.ranks import Ranks

Make = Callable[[Any, bool, TorchLayout, Ranks, type, Sequence[str]], Mode]
"""(options, whether it averages, layout, ranks, the optimizer's class, names of its hyperparameters)."""


def _gradients(options: Scheme, average: bool, layout: TorchLayout, ranks: Ranks, _: type,
               __: Sequence[str]) -> FlatReducer[TorchLayout]:
    return FlatReducer(options, average, layout, make_accumulator, ranks)


def _partial(options: Partial, average: bool, layout: TorchLayout, ranks: Ranks, _: type,
             settings: Sequence[str]) -> PartialReducer[TorchLayout]:
    return PartialReducer(options, average, layout, make_accumulator, ranks, settings)


def _step_ahead(options: StepAhead, average: bool, layout: TorchLayout, ranks: Ranks, optimizer: type,
                __: Sequence[str]) -> StepAheadReducer[TorchLayout]:
    names = [name for name, *_ in layout.entries]

    def read() -> list[torch.Tensor]:
        message = layout.changed()
        if message is not None:
            raise PluginError(message)
        return [flat_memory(name, p) for name, p in zip(names, layout.parameters, strict=True)]

    if layout.device.type == "cpu":
        replica: Any = TorchHostReplica(layout, read)
        accumulator: Any = NumpyParameterAccumulator(layout.n, layout.dtype)
    else:
        replica = TorchReplica(layout, read)
        accumulator = TorchParameterAccumulator(layout.n, layout.dtype, layout.device)
    return StepAheadReducer(options, average, layout, accumulator, replica, ranks, normalizes(optimizer))


KINDS: dict[type, tuple[type[Mode], Make]] = {StepAhead: (StepAheadReducer, _step_ahead),
                                              Partial: (PartialReducer, _partial)}


def kind_of(options: Any) -> tuple[type[Mode], Make]:
    """Return the class of the options' mode, and what makes one. This is the one place that tells modes apart."""
    return KINDS.get(type(options), (FlatReducer, _gradients))


def with_scheme(options: Any, scheme: Scheme) -> Any:
    """Return the same options with another scheme."""
    return scheme if isinstance(options, Scheme) else replace(options, inner=scheme)

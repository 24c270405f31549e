"""The plugin in horovod.torch: the few names that are wrapped (docs/architecture.md says why), and no others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import horovod
import horovod.torch as hvd
import horovod.torch.optimizer as stock
from horovod.common.elastic import State
from horovod.torch.elastic.state import TorchState

from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.ending import wrap_shutdown
from horovod_oktopk.schemes import as_options
from horovod_oktopk.schemes.dense import means_dense
from horovod_oktopk.torch.elastic import ElasticTorchState
from horovod_oktopk.torch.horovod import HorovodPeers
from horovod_oktopk.torch.names import forget_names, name_operations
from horovod_oktopk.torch_base import make
from horovod_oktopk.torch_base.registry import add_dense, is_in_use, make_way
from horovod_oktopk.transport.elastic import extend_elastic
from horovod_oktopk.transport.horovod import check_arguments, check_horovod, refuse_join

_TAKES = ["optimizer", "named_parameters", "compression", "backward_passes_per_step", "op",
          "gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense", "process_set"]


def install() -> None:
    """Wrap Horovod's names, once. Raise PluginError if this Horovod is not the one that is known."""
    if hasattr(stock, "_oktopk_installed"):
        return
    check_horovod(horovod.__version__, {stock.DistributedOptimizer: _TAKES})
    hvd.DistributedOptimizer = stock.DistributedOptimizer = _wrap_factory(stock.DistributedOptimizer)
    hvd.join = hvd.mpi_ops.join = refuse_join(is_in_use, hvd.join)
    name_operations()
    wrap_shutdown(hvd, forget_names)
    extend_elastic(State, TorchState, ElasticTorchState)
    make.install()
    stock._oktopk_installed = True


def _wrap_factory(factory: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        optimizer, options = given["optimizer"], as_options(given["compression"])
        if hasattr(optimizer, "_allreduce_grad_async"):  # stock Horovod's
            raise PluginError(make.TWICE)
        if options is None:
            make.refuse_ours(optimizer)
            made = factory(*args, **kwargs)
            make_way([p for group in made.param_groups for p in group["params"]])
            if means_dense(given["compression"]):
                add_dense(made)
            return made
        check_arguments(hvd, given["op"], given["gradient_predivide_factor"])
        if given["backward_passes_per_step"] <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        make.make(optimizer, options, given["named_parameters"], given["op"] == hvd.Average,
                  given["sparse_as_dense"], functools.partial(HorovodPeers, given["process_set"]), stock.__name__)
        return optimizer

    return wrapped

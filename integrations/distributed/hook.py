"""A communication hook of DistributedDataParallel, which reduces gradients by a scheme of this package."""

# No `from __future__ import annotations`: register_comm_hook compares the hook's annotations with classes.
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_oktopk.distributed.ddp import future_for, models_over
from horovod_oktopk.distributed.groups import GroupRanks
from horovod_oktopk.distributed.private import hooks_of
from horovod_oktopk.errors import PluginError
from horovod_oktopk.modes.mode import Mode
from horovod_oktopk.schemes import OkTopk, own_options
from horovod_oktopk.schemes.options import Scheme
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.state import gather
from horovod_oktopk.torch_base.device import make_torch_mode
from horovod_oktopk.torch_base.state import records_of, state_of
from horovod_oktopk.torch_base.tensors import DenseGradients, TorchLayout

GRADIENTS_ALONE = ("a communication hook reduces gradients, and takes a scheme such as OkTopk(...); got {given!r}. "
                   "For StepAhead call leave_gradients(model), and give the optimizer to DistributedOptimizer")
SPARSE = ("DistributedDataParallel has a bucket with a sparse gradient, which this hook cannot reduce: make the "
          "embedding's gradients dense (sparse=False), or train the plain model with DistributedOptimizer")
OTHER_GROUP = ("DistributedDataParallel has the ranks {ddp}, and this OkTopkState {ours}: give it the same group, "
               "OkTopkState(process_group=...)")
OTHERS = ("this OkTopkState is the memory of another model, or of one with other trained parameters than now: make "
          "an OkTopkState for each DistributedDataParallel, and give it the old one's residual, if there is one, by "
          "new.load_state_dict(old.state_dict())")


class OkTopkState:
    """The memory of `oktopk_hook` between steps: this rank's residual, by parameter.

    Args:
        process_group: the ranks, as given to DistributedDataParallel; None is all ranks.
        compression: a scheme, with its options.
        named_parameters: `model.named_parameters()`; without it parameters have the order of the first backward pass.
        scaler: the `torch.amp.GradScaler` by which the loss is multiplied; the residual is in true units.

    Raises:
        PluginError: The compression is StepAhead or Partial, or none of this package; later, in `backward()`, that
            the gradients are those of other parameters than the state's.
    """

    def __init__(self, process_group: Any = None, compression: Any = OkTopk,
                 named_parameters: Iterable[tuple[str, torch.Tensor]] = (), scaler: Any = None) -> None:
        options = own_options(compression)
        if not isinstance(options, Scheme):
            raise PluginError(GRADIENTS_ALONE.format(given=compression))
        self._options, self._scaler = options, scaler
        self._names = {p: name for name, p in named_parameters}
        self._group, self._ranks = process_group, GroupRanks(process_group)
        self._mode: Mode[Any] | None = None
        self._layout: TorchLayout
        self._loaded: list[Any] = []  # which waits for the first step
        self._finds_unused = self._shares_buckets = False  # as DDP says
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}  # of this backward pass, by parameter
        self._futures: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []

    def __reduce__(self) -> Any:
        """Copy or pickle the options alone, as a copy of the model, which has no hook, copies this with it."""
        return OkTopkState, (None, self._options)

    @property
    def report(self) -> StepReport | None:
        """The report of the last reduction; None before the first."""
        return None if self._mode is None else self._mode.report

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of all ranks on rank 0, this rank's own on the others. Collective."""
        records = self._loaded if self._mode is None else gather.records(self._mode, "gather the state (state_dict)")
        return state_of(records)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` has returned on rank 0, on these or other ranks."""
        records = records_of(state)
        if self._mode is None:
            self._loaded = records
        else:
            self._mode.load(records)

    def add(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Keep a bucket's gradients; reduce all with the last one."""
        if bucket.index() == 0:  # also after a backward pass that has failed
            self._gradients, self._futures = {}, []
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise PluginError(SPARSE)
        self._gradients |= dict(zip(bucket.parameters(), bucket.gradients(), strict=True))
        future = future_for(buffer)
        self._futures.append((future, buffer))
        if bucket.is_last():
            self._reduce()
            for each, whole in self._futures:
                each.set_result(whole)
        return future

    def _reduce(self) -> None:
        mode = self._mode_of_these()
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        tensors = [self._gradients[p] for p in self._layout.parameters]
        if scale != 1:
            torch._foreach_mul_(tensors, 1 / scale)
        mode.reduce(DenseGradients(self._layout, bool(self._options.hierarchical), tensors))
        if scale != 1:
            torch._foreach_mul_(tensors, scale)
        if self._finds_unused:
            self._write(tensors)

    def _write(self, tensors: list[torch.Tensor]) -> None:
        """Write gradients into `p.grad`: DDP does not, where no rank has used p, but its residual may be sent now."""
        for p, tensor in zip(self._layout.parameters, tensors, strict=True):
            if p.grad is None:
                p.grad = tensor if self._shares_buckets else tensor.clone()
            elif p.grad.data_ptr() != tensor.data_ptr():
                p.grad.copy_(tensor)

    def _mode_of_these(self) -> Mode[Any]:
        """Return the mode; made at the first step, as only then the parameters are known."""
        if self._mode is None:
            named = {self._names.get(p, f"{place:06d}"): p for place, p in enumerate(self._gradients)}
            self._layout = TorchLayout(dict(sorted(named.items())))
            models = models_over(named.values())
            self._check_group(models)
            self._finds_unused = any(model.find_unused_parameters or model.static_graph for model in models)
            self._shares_buckets = any(model.gradient_as_bucket_view for model in models)
            self._mode = make_torch_mode(self._options, True, self._layout, self._ranks, torch.optim.SGD, ())
            if self._loaded:
                self._mode.load(self._loaded)
                self._loaded = []
        elif self._gradients.keys() != {*self._layout.parameters}:
            raise PluginError(OTHERS)
        return self._mode

    def _check_group(self, models: Iterable[DistributedDataParallel]) -> None:
        """Raise PluginError if a model that has this state is one of other ranks."""
        ours = dist.get_process_group_ranks(self._group)
        of_this = (each for each in models if any(state is self for _, state in hooks_of(each)))
        for ddp in (dist.get_process_group_ranks(each.process_group) for each in of_this):
            if ddp != ours:
                raise PluginError(OTHER_GROUP.format(ddp=ddp, ours=ours))


def oktopk_hook(state: OkTopkState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce the gradients of a model in DistributedDataParallel by a scheme of this package.

    All buckets of a backward pass are reduced together, with the last one, by one selection over all parameters: the
    bits are those of `DistributedOptimizer`. Its errors come out of `backward()`.

    Args:
        state: made with the scheme.
        bucket: given by DistributedDataParallel.

    Returns:
        A future of the bucket's reduced gradients, shape (elements of the bucket,).

    Examples:
        >>> state = OkTopkState(compression=OkTopk(density=0.01), named_parameters=model.module.named_parameters())
        >>> model.register_comm_hook(state, oktopk_hook)
    """
    return state.add(bucket)

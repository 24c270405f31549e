"""torch.amp.GradScaler: every rank skips the same steps, and the residual keeps its unit."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from horovod_oktopk import PluginError
from horovod_oktopk.torch import OkTopk
from tests.torch.scenarios.common import (
    assert_equal_everywhere,
    backward,
    distribute,
    flat,
    gradients,
    parameters,
    raised_everywhere,
)


def scaler_of(scale: float, interval: int = 2000) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)


def scaled_step(optimizer: Any, scaler: Any, params: dict[str, torch.nn.Parameter],
                grads: dict[str, torch.Tensor]) -> None:
    optimizer.zero_grad()
    loss = sum((params[name] * grads[name]).sum() for name in grads)
    scaler.scale(loss).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()


def check_residual_keeps_its_unit_while_the_scale_grows() -> None:
    results = []
    for scaler in (None, scaler_of(4.0, interval=1)):
        params = parameters()
        optimizer = distribute(params, OkTopk(density=0.1, threshold_interval=1), op=hvd.Sum)
        for step in range(6):
            if scaler is None:
                optimizer.zero_grad()
                backward(params, gradients(step, hvd.rank()))
                optimizer.step()
            else:
                scaled_step(optimizer, scaler, params, gradients(step, hvd.rank()))
        results.append(flat(params))
    assert scaler is not None
    assert scaler.get_scale() == 4.0 * 2**6
    assert np.array_equal(*results)


def check_every_optimizer_goes_by_its_own_scaler() -> None:
    results = []
    for scales in ((None, None), (4.0, 64.0)):
        models = [parameters(), parameters()]
        optimizers = [distribute(params, OkTopk(density=0.1, threshold_interval=1), op=hvd.Sum) for params in models]
        scalers = [torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=interval, enabled=bool(scale))
                   for scale, interval in zip(scales, (1, 2), strict=True)]
        for step in range(5):
            for params, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
                optimizer.zero_grad()
                scaler.scale(sum((params[name] * grad).sum()
                                 for name, grad in gradients(step, hvd.rank()).items())).backward()
            for optimizer, scaler in zip(optimizers, scalers, strict=True):
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
        results.append(np.concatenate([flat(params) for params in models]))
    assert np.array_equal(*results)


def check_overflow_on_one_rank_skips_the_step_on_all() -> None:
    results = []
    for overflow in (False, True):
        params = parameters()
        optimizer = distribute(params, OkTopk(density=0.1, threshold_interval=1), op=hvd.Sum)
        scaler = scaler_of(1024.0)
        for step in range(5):
            if overflow and step in (0, 3):
                before = flat(params)
                grads = gradients(99, hvd.rank())
                if hvd.rank() == 0:
                    grads["b.weight"][0, 0] = float("inf")
                scale = scaler.get_scale()
                scaled_step(optimizer, scaler, params, grads)
                assert np.array_equal(flat(params), before)
                assert scaler.get_scale() == scale / 2
            scaled_step(optimizer, scaler, params, gradients(step, hvd.rank()))
        assert_equal_everywhere(params.values())
        results.append(flat(params))
    assert np.array_equal(*results), "a skipped step left a trace"


def check_a_resumed_run_knows_the_scale() -> None:
    def run(resume: bool) -> np.ndarray:
        params = parameters()
        optimizer = distribute(params, OkTopk(density=0.1, threshold_interval=1), op=hvd.Sum)
        scaler = scaler_of(2.0, interval=1)
        for step in range(6):
            if resume and step == 3:
                state, scaler_state = optimizer.state_dict(), scaler.state_dict()
                params = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
                optimizer = distribute(params, OkTopk(density=0.1, threshold_interval=1), op=hvd.Sum)
                scaler = scaler_of(1.0, interval=1)
                optimizer.load_state_dict(state)
                scaler.load_state_dict(scaler_state)
            scaled_step(optimizer, scaler, params, gradients(step, hvd.rank()))
        return flat(params)

    assert np.array_equal(run(resume=True), run(resume=False))


def check_a_step_without_synchronize_is_refused() -> None:
    params = parameters()
    optimizer = distribute(params, OkTopk)
    scaler = scaler_of(2.0)
    scaler.scale(params["d"].sum()).backward()
    for call in (scaler.step, scaler.unscale_):
        assert "optimizer.synchronize()" in raised_everywhere(PluginError, lambda call=call: call(optimizer))[0]
    optimizer.synchronize()

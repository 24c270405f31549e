"""torch.amp.GradScaler: every rank skips the same steps, and a loss scale leaves no trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from horovod_oktopk import PluginError
from tests.torch.library import OkTopk, hvd
from tests.torch.scenarios.common import (
    Params,
    assert_equal_everywhere,
    distribute,
    flat,
    gradients,
    loss_with,
    made,
    parameters,
    raised_everywhere,
    record_of,
    take_steps,
)


def scaler_of(scale: float, interval: int = 2000) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)


def scaled_step(optimizer: Any, scaler: Any, params: Params, grads: dict[str, torch.Tensor],
                clips: bool = False) -> None:
    """Take a scaled step. clips: gradients are unscaled and reduced before it, to be clipped in between."""
    optimizer.zero_grad()
    scaler.scale(loss_with(params, grads)).backward()
    if clips:
        scaler.unscale_(optimizer)
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(params.values(), 1e9)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)
    scaler.update()


def check_a_loss_scale_leaves_no_trace() -> None:
    """Loss scales may differ between ranks, and grow."""
    results = []
    for scaler, clips in ((None, False), (scaler_of(4.0, interval=1), False), (scaler_of(4.0, interval=1), True),
                          (scaler_of(2.0 ** (3 + hvd.rank())), False)):
        params, optimizer = made(OkTopk(density=0.1, threshold_interval=1), op=hvd.Sum)
        for step in range(6):
            if scaler is None:
                take_steps(optimizer, params, step)
            else:
                scaled_step(optimizer, scaler, params, gradients(step), clips)
        results.append([flat(params), record_of(optimizer)["residual"].numpy()])
    assert all(np.array_equal(results[0], found) for found in results)


def check_overflow_on_one_rank_skips_the_step_on_all() -> None:
    """Only that rank's scale is lowered."""
    for clips in (False, True):
        results = []
        for overflow in (False, True):
            params = parameters()
            inner = torch.optim.SGD(params.values(), lr=1.0, momentum=0.5)
            optimizer = distribute(params, OkTopk(density=0.1), inner, op=hvd.Sum)
            scaler = scaler_of(1024.0)
            for step in range(5):
                if overflow and step in (0, 3):
                    before = flat(params)
                    grads = gradients(99)
                    if hvd.rank() == 0:
                        grads["b.weight"][0, 0] = float("inf")
                    scale = scaler.get_scale()
                    scaled_step(optimizer, scaler, params, grads, clips)
                    assert np.array_equal(flat(params), before)
                    assert scaler.get_scale() == (scale / 2 if hvd.rank() == 0 else scale)
                scaled_step(optimizer, scaler, params, gradients(step), clips)
            assert_equal_everywhere(params.values())
            results.append(flat(params))
        assert np.array_equal(*results), "a skipped step left a trace"


def check_orders_that_would_reduce_scales_or_clip_parts_are_refused() -> None:
    def stepped_alone(scaler: Any, optimizer: Any) -> None:
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)

    def unscaled_late(scaler: Any, optimizer: Any) -> None:
        optimizer.synchronize()
        scaler.unscale_(optimizer)

    def never_reduced(scaler: Any, optimizer: Any) -> None:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)

    for program, says in ((stepped_alone, "while they held the loss scale"),
                          (unscaled_late, "while they held the loss scale"), (never_reduced, "clip their mean")):
        params, scaler = parameters(), scaler_of(2.0)
        optimizer = distribute(params, OkTopk)
        scaler.scale(sum(p.sum() for p in params.values())).backward()
        message = raised_everywhere(PluginError, lambda made=(scaler, optimizer), run=program: run(*made))[0]
        assert says in message, message
        assert "scaler.step(optimizer) alone" in message, message
        take_steps(optimizer, params, 0)  # the scaler is forgotten
        assert_equal_everywhere(params.values())


def check_float16_gradients_are_not_unscaled() -> None:
    """They would vanish before they are added to the residual; PyTorch refuses them, too."""
    params = parameters(torch.float16)
    optimizer, scaler = distribute(params, OkTopk), scaler_of(2.0)
    scaler.scale(sum(p.sum() for p in params.values())).backward()
    message = raised_everywhere(PluginError, lambda: scaler.step(optimizer))[0]
    assert "Keep float32 parameters" in message, message

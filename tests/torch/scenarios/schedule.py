"""DensitySchedule: the density of every epoch, on all ranks together, and of a run that goes on."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from horovod_oktopk import OptionError, PluginError
from horovod_oktopk.torch import DensitySchedule, GTopk, OkTopk, step_report
from tests.torch.scenarios.common import (
    N,
    assert_equal_everywhere,
    backward,
    distribute,
    flat,
    gradients,
    parameters,
    raised_everywhere,
)

WARM_UP = [1.0, 0.5, 0.25]


def train(optimizer: Any, params: dict[str, torch.nn.Parameter], schedule: DensitySchedule, epochs: range,
          ) -> list[int]:
    """k of every epoch; two steps each."""
    found = []
    for epoch in epochs:
        for step in (2 * epoch, 2 * epoch + 1):
            optimizer.zero_grad()
            backward(params, gradients(step, hvd.rank()))
            optimizer.step()
        found.append(step_report(optimizer).k)
        schedule.step()
    return found


def ks(densities: list[float]) -> list[int]:
    return [round(density * N) for density in densities]


def check_densities_follow_the_schedule_and_then_the_options() -> None:
    for compression in (OkTopk(density=0.1), GTopk(density=0.1)):
        for schedule in (WARM_UP, lambda epoch: WARM_UP[epoch] if epoch < 3 else None):
            params = parameters()
            optimizer = distribute(params, compression)
            found = train(optimizer, params, DensitySchedule(optimizer, schedule), range(5))
            assert found == ks([*WARM_UP, 0.1, 0.1])
            assert_equal_everywhere(params.values())


def check_a_dense_first_epoch_leaves_nothing_behind() -> None:
    params = parameters()
    optimizer = distribute(params, OkTopk(density=0.1), op=hvd.Sum)
    train(optimizer, params, DensitySchedule(optimizer, [1.0]), range(1))
    total = sum(flat(gradients(step, rank)) for step in range(2) for rank in range(hvd.size()))
    assert np.array_equal(flat(params), -total)


def check_a_resumed_run_has_the_densities_and_the_bits_of_one_that_went_on() -> None:
    params = parameters()
    optimizer = distribute(params, OkTopk(density=0.1))
    schedule = DensitySchedule(optimizer, WARM_UP)
    train(optimizer, params, schedule, range(2))
    state, epoch = optimizer.state_dict(), schedule.state_dict()
    values = {name: p.detach().clone() for name, p in params.items()}
    train(optimizer, params, schedule, range(2, 5))

    def of_an_epoch(resumed: Any) -> DensitySchedule:
        return DensitySchedule(resumed, WARM_UP, epoch=epoch["epoch"])

    def of_a_state(resumed: Any) -> DensitySchedule:
        made = DensitySchedule(resumed, WARM_UP)
        made.load_state_dict(epoch)
        return made

    for make in (of_an_epoch, of_a_state):
        again = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        resumed = distribute(again, OkTopk(density=0.1))
        resumed.load_state_dict(state)
        assert train(resumed, again, make(resumed), range(2, 5)) == ks([0.25, 0.1, 0.1])
        assert np.array_equal(flat(again), flat(params))


def check_a_refused_schedule_changes_nothing() -> None:
    optimizer = distribute(parameters(), OkTopk(density=0.1))
    for bad in ([], [0.5, 0.0], [float("nan")], "0.5", lambda epoch: 2.0):
        raised_everywhere(OptionError, lambda bad=bad: DensitySchedule(optimizer, bad))
    assert "epoch" in raised_everywhere(OptionError, lambda: DensitySchedule(optimizer, epoch=-1))[0]
    schedule = DensitySchedule(optimizer, lambda epoch: 0.5 if epoch == 0 else 1.5)
    assert "epoch 1" in raised_everywhere(OptionError, schedule.step)[0]
    assert (schedule.epoch, schedule.density) == (0, 0.5)
    assert "epoch" in raised_everywhere(OptionError, lambda: schedule.load_state_dict({"step": 3}))[0]


def check_other_optimizers_are_refused() -> None:
    plain = distribute(parameters(), hvd.Compression.none)
    assert "compression=OkTopk" in raised_everywhere(PluginError, lambda: DensitySchedule(plain))[0]

"""PyTorch's profiler shows the phases of a step."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch.profiler import ProfilerActivity, profile

from horovod_oktopk.torch import OkTopk, StepAhead, step_report
from tests.scenarios.common import gradients
from tests.torch.driver import Kind


def phases_that_are_missing(compression: Any, **options: Any) -> set[str]:
    """From the profile of a step."""
    trainer = Kind("optimizer")(compression)
    trainer.step(gradients(0, hvd.rank()))
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        trainer.step(gradients(1, hvd.rank()))
    report = step_report(trainer.optimizer)
    assert report is not None
    assert {"accumulate", "agree", "select"} <= report.phases.keys()
    return {f"oktopk/{phase}" for phase in report.phases} - {event.key for event in profiler.key_averages()}


def check_the_profiler_shows_the_phases_of_a_step() -> None:
    assert phases_that_are_missing(OkTopk()) == set()


def check_the_profiler_of_all_threads_shows_the_exchange_of_step_ahead() -> None:
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    assert phases_that_are_missing(StepAhead(overlap=False), experimental_config=everywhere) == set()

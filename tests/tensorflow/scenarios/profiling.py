"""TensorFlow's profiler shows the phases of a step."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk import OkTopk
from tests.scenarios.common import gradients
from tests.tensorflow.driver import Kind


def check_the_profiler_shows_the_phases_of_a_step() -> None:
    trainer = Kind("tape")(OkTopk())
    trainer.step(gradients(0, hvd.rank()))
    with TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            trainer.step(gradients(1, hvd.rank()))
        (written,) = Path(folder).rglob("*.xplane.pb")
        shown = written.read_bytes()
    report = trainer.report()
    assert report is not None
    assert len(report.phases) > 4
    assert all(f"oktopk/{phase}".encode() in shown for phase in report.phases)

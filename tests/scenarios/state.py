"""Residuals and counters in files: the run goes on as if nothing had happened."""

from __future__ import annotations

import json
import zipfile

import numpy as np

from horovod_oktopk import GTopk, OkTopk, OptionError, TopkDSA
from tests.scenarios.common import (
    SHAPES,
    N,
    assert_conserved,
    everywhere,
    flat,
    gradients,
    raised_everywhere,
    shared_folder,
    take_steps,
    warned,
)
from tests.scenarios.driver import Kind

OPTIONS = OkTopk(density=0.1, selection="reuse", threshold_interval=4, region_interval=5)
"""Options with which the selection depends on the thresholds of the steps before."""


def check_a_resumed_run_gives_the_same_bits(kind: Kind) -> None:
    for options in (OPTIONS, TopkDSA(density=0.1), GTopk(density=0.1)):
        uninterrupted = kind(options)
        take_steps(kind.hvd, uninterrupted, *range(12))
        trainer = kind(options)
        take_steps(kind.hvd, trainer, *range(6))
        values = trainer.values()
        with shared_folder(kind.hvd) as folder:
            trainer.save(f"{folder}/state")
            take_steps(kind.hvd, trainer, 0)  # what happens after the checkpoint must leave no trace in it
            for resumed in (kind(options), trainer):  # before the first step, and in the middle
                resumed.assign(values)
                resumed.load(f"{folder}/state")
                take_steps(kind.hvd, resumed, *range(6, 12))
                assert resumed.report().step == 12
                assert np.array_equal(flat(resumed.values()), flat(uninterrupted.values()))
                assert np.array_equal(resumed.residual(), uninterrupted.residual())
            everywhere(kind.hvd, "done with the file")


def check_the_sum_of_residuals_survives_another_number_of_ranks(kind: Kind) -> None:
    hvd = kind.hvd
    former = hvd.size() + 2
    held = np.random.default_rng(7).integers(-9, 10, (former, N)).astype(np.float32)
    with shared_folder(hvd) as folder:
        donor = kind(OPTIONS, op=hvd.Sum)
        take_steps(kind.hvd, donor, 0)
        donor.save(f"{folder}/state")
        if hvd.rank() == 0:
            kind.rewrite(f"{folder}/state", list(held))
        everywhere(hvd, "written")
        trainer = kind(OPTIONS, op=hvd.Sum)
        with warned() as messages:
            trainer.load(f"{folder}/state")
            trainer.step({name: np.zeros_like(g) for name, g in gradients(0, 0).items()})
    was_told = everywhere(hvd, any("still moves the model as far" in message for message in messages))
    assert was_told[0]
    assert trainer.report().step == 2
    assert_conserved(hvd, trainer, held.sum(axis=0))


def check_the_mean_of_residuals_survives_another_number_of_ranks(kind: Kind) -> None:
    """Averages of what ranks send are to be as much with fewer ranks, or more."""
    hvd = kind.hvd
    for former in {1, hvd.size() + 1, 2 * hvd.size()} - {hvd.size()}:
        held = np.random.default_rng(7).integers(-9, 10, (former, N)).astype(np.float32)
        with shared_folder(hvd) as folder:
            donor = kind(OPTIONS)
            take_steps(kind.hvd, donor, 0)
            donor.save(f"{folder}/state")
            if hvd.rank() == 0:
                kind.rewrite(f"{folder}/state", list(held))
            everywhere(hvd, "written")
            trainer = kind(OPTIONS)
            trainer.load(f"{folder}/state")
            trainer.step({name: np.zeros_like(g) for name, g in gradients(0, 0).items()})
        kept = np.mean(everywhere(hvd, trainer.residual()), axis=0) - flat(trainer.values())
        np.testing.assert_allclose(kept, held.mean(axis=0), atol=1e-4)


def check_a_checkpoint_of_another_model_is_refused(kind: Kind) -> None:
    with shared_folder(kind.hvd) as folder:
        shapes = dict.fromkeys(SHAPES, (3,))
        trainer = kind(OkTopk(density=0.1), shapes=shapes)
        trainer.step(gradients(0, kind.hvd.rank(), shapes=shapes))
        trainer.save(f"{folder}/state")

        def resume() -> None:
            other = kind(OPTIONS)
            other.load(f"{folder}/state")
            take_steps(kind.hvd, other, 0)

        message = raised_everywhere(kind.hvd, OptionError, resume)[0]
        assert "12" in message, message
        assert str(N) in message


def rewrite(path: str, residuals: list[np.ndarray]) -> None:
    """Turn a file of `horovod_oktopk.state.gather` into one of as many ranks as there are residuals."""
    with zipfile.ZipFile(path) as archive:
        content = json.loads(archive.read("records.json"))
    record = content["reductions"][0][0]
    content["reductions"][0] = [
        {**record, "rank": rank, "size": len(residuals), "process": "another",
         "residual": {"n": len(residual), "file": f"0.{rank}.npy"}} for rank, residual in enumerate(residuals)]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("records.json", json.dumps(content))
        for rank, residual in enumerate(residuals):
            with archive.open(f"0.{rank}.npy", "w") as file:
                np.lib.format.write_array(file, residual)

"""`compression=StepAhead(...)`: local steps, what they did is reduced, and nothing is lost."""

from __future__ import annotations

import numpy as np

from horovod_oktopk import OkTopk, StepAhead, TopkA
from tests.scenarios.common import (
    assert_disagreement,
    assert_equal_everywhere,
    everywhere,
    flat,
    gradients,
    is_last,
    needs_ranks,
    shared_folder,
    total,
)
from tests.scenarios.driver import Kind

OPTIONS = StepAhead(OkTopk(density=0.1))


def check_everything_at_once_is_plain_sgd(kind: Kind) -> None:
    """Where all is sent at every step, and nothing is ahead, the shared parameters are those of dense training."""
    trainer = kind(StepAhead(OkTopk(density=1.0, value_dtype=None), ahead=1, overlap=False), op=kind.hvd.Sum)
    for step in range(4):
        trainer.step(gradients(step, kind.hvd.rank()))
        assert np.array_equal(flat(trainer.values()), -sum(total(kind.hvd, at) for at in range(step + 1)))


def check_what_was_moved_is_shared_or_held(kind: Kind) -> None:
    for options in (OPTIONS, StepAhead(TopkA(density=0.1), overlap=False, local_steps=3)):
        trainer = kind(options, op=kind.hvd.Sum)
        for step in range(9):
            trainer.step(gradients(step, kind.hvd.rank()))
        values, held = flat(trainer.values()), sum(everywhere(kind.hvd, trainer.residual()))
        assert_equal_everywhere(kind.hvd, trainer.values())
        assert np.abs(values).max() > 0
        ratio = options.coefficient(kind.hvd.size(), False)
        np.testing.assert_allclose(held - ratio * values, ratio * sum(total(kind.hvd, at) for at in range(9)),
                                   rtol=1e-4, atol=1e-2)


def check_a_resumed_run_gives_the_same_bits(kind: Kind) -> None:
    trainer, resumed = kind(OPTIONS), kind(OPTIONS)
    for step in range(5):
        trainer.step(gradients(step, kind.hvd.rank()))
    with shared_folder(kind.hvd) as folder:
        trainer.save(f"{folder}/state")
        resumed.assign(trainer.values())
        resumed.load(f"{folder}/state")
    for step in range(5, 10):
        for each in (trainer, resumed):
            each.step(gradients(step, kind.hvd.rank()))
    assert flat(trainer.values()).tobytes() == flat(resumed.values()).tobytes()
    assert trainer.residual().tobytes() == resumed.residual().tobytes()


def check_different_options_are_refused(kind: Kind) -> None:
    needs_ranks(kind.hvd)
    trainer = kind(StepAhead(OkTopk(density=0.1), ahead=0.5 if is_last(kind.hvd) else 0.6))
    assert_disagreement(kind.hvd, lambda: trainer.step(gradients(0, kind.hvd.rank())), "ahead: 0.5", "ahead: 0.6")

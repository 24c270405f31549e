"""Features of Horovod that go on working: compared with stock Horovod, at density 1."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_oktopk import Partial
from tests.scenarios.common import (
    DENSE,
    SHAPES,
    assert_equal_everywhere,
    flat,
    gradients,
    needs,
    needs_ranks,
    shared_folder,
    take_steps,
    total,
)
from tests.scenarios.driver import Kind


def train(kind: Kind, compression: Any, **arguments: Any) -> np.ndarray:
    """Return the parameters after four steps."""
    trainer = kind(compression, **arguments)
    take_steps(kind.hvd, trainer, *range(4))
    assert_equal_everywhere(kind.hvd, trainer.values())
    return flat(trainer.values())


def assert_like_stock(kind: Kind, compression: Any = DENSE, **arguments: Any) -> None:
    """Compare with stock Horovod, but for rounding: stock multiplies by 1/P where we divide by P."""
    stock, ours = train(kind, kind.hvd.Compression.none, **arguments), train(kind, compression, **arguments)
    assert np.abs(stock).max() > 1
    np.testing.assert_allclose(ours, stock, rtol=1e-5, atol=1e-4)


def check_average(kind: Kind) -> None:
    assert_like_stock(kind)


def check_sum_is_exact(kind: Kind) -> None:
    for compression in (DENSE, kind.hvd.Compression.none):
        assert np.array_equal(train(kind, compression, op=kind.hvd.Sum), -total(kind.hvd, *range(4)))


def check_gradient_predivide_factor(kind: Kind) -> None:
    needs(kind.supports("gradient_predivide_factor"), "gradient_predivide_factor")
    assert_like_stock(kind, gradient_predivide_factor=4.0)


def check_groups(kind: Kind) -> None:
    needs(kind.supports("groups"), "groups")
    assert_like_stock(kind, groups=2)
    assert_like_stock(kind, groups=[["d", "a.bias"], ["b.weight"]])


def assert_passes_like_stock(kind: Kind, ours: Any) -> None:
    needs(kind.supports("backward_passes_per_step"), "backward_passes_per_step")
    results = []
    for compression in (kind.hvd.Compression.none, ours):
        trainer = kind(compression, backward_passes_per_step=3)
        for step in range(3):
            kind.passes(trainer, [gradients(3 * step + i, kind.hvd.rank()) for i in range(3)])
        results.append(flat(trainer.values()))
        assert_equal_everywhere(kind.hvd, trainer.values())
        if compression is ours:
            assert trainer.report().step == 3, "one reduction for three passes"
    assert np.abs(results[0]).max() > 1
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-4)


def check_backward_passes_per_step(kind: Kind) -> None:
    assert_passes_like_stock(kind, DENSE)


def check_a_rank_outside_the_process_set_trains_alone(kind: Kind) -> None:
    hvd = kind.hvd
    needs_ranks(hvd)
    inside = kind.sets[0]
    own = inside.ranks if inside.included() else [hvd.rank()]
    expected = -sum(flat(gradients(step, rank)) for step in range(2) for rank in own)
    mine = inside if inside.included() else kind.sets[1]
    partial = [Partial(DENSE, policy="solo")] if hvd.size() == 2 and kind.runs_partial else []
    for compression, process_set in ((DENSE, mine), *((each, inside) for each in
                                                     (hvd.Compression.none, DENSE, *partial))):
        trainer = kind(compression, op=hvd.Sum, process_set=process_set)
        take_steps(hvd, trainer, 0, 1)
        trainer.synchronize_replicas()
        assert np.array_equal(flat(trainer.values()), expected)
    for options in (DENSE, *partial):
        _report_set_density_and_save(kind, options)


def _report_set_density_and_save(kind: Kind, options: Any) -> None:
    trainer = kind(options, process_set=kind.sets[0])
    trainer.step(gradients(0, kind.hvd.rank()))
    assert (trainer.report() is None) == (not kind.sets[0].included())
    if kind.name not in ("tape", "function"):  # which know reducers by their variables alone
        trainer.set_density(0.5)
        with shared_folder(kind.hvd) as folder:
            trainer.save(f"{folder}/state")


def small(rank: int) -> dict[str, np.ndarray]:
    """Return gradients whose sum over many ranks is exact in 8 bits of significance."""
    return {name: np.trunc(gradient / 4) for name, gradient in gradients(0, rank).items()}


def check_half_precision(kind: Kind) -> None:
    for dtype in ("float16", "bfloat16"):
        trainer = kind(DENSE, dtype=dtype, op=kind.hvd.Sum)
        trainer.step(small(kind.hvd.rank()))
        values = trainer.values()
        assert_equal_everywhere(kind.hvd, values)
        for name, value in values.items():
            exact = -sum(small(rank)[name] for rank in range(kind.hvd.size()))
            assert np.array_equal(value, exact.astype(value.dtype))


def check_double_precision(kind: Kind) -> None:
    trainer = kind(DENSE, dtype="float64", op=kind.hvd.Sum)
    exact = np.zeros(1)
    for step in range(3):
        grads = {name: g + 2.0**-40 for name, g in gradients(step, kind.hvd.rank(), np.float64).items()}
        trainer.step(grads)
        exact = exact - total(kind.hvd, step).astype(np.float64) - kind.hvd.size() * 2.0**-40
    assert np.array_equal(flat(trainer.values()), exact)


def check_two_trainers(kind: Kind) -> None:
    trainers = [kind(DENSE, op=kind.hvd.Sum), kind(DENSE, op=kind.hvd.Sum)]
    for step in range(2):
        for offset, trainer in enumerate(trainers):
            take_steps(kind.hvd, trainer, step + 50 * offset)
    for offset, trainer in enumerate(trainers):
        assert trainer.report().step == 2
        assert np.array_equal(flat(trainer.values()), -total(kind.hvd, 50 * offset, 50 * offset + 1))


def check_a_part_of_the_parameters(kind: Kind) -> None:
    trainer = kind(DENSE, shapes={"d": SHAPES["d"]}, op=kind.hvd.Sum)
    trainer.step({"d": np.full(1, float(kind.hvd.rank() + 1), np.float32)})
    assert trainer.values()["d"] == -sum(range(1, kind.hvd.size() + 1))


def check_other_compressions_are_left_alone(kind: Kind) -> None:
    needs(hasattr(kind.hvd.Compression, "fp16"), "Horovod's own compressions")
    for compression in (kind.hvd.Compression.fp16, kind.hvd.Compression.none):
        trainer = kind(compression, op=kind.hvd.Sum)
        trainer.step(gradients(0, kind.hvd.rank()))
        assert np.array_equal(flat(trainer.values()), -total(kind.hvd, 0))

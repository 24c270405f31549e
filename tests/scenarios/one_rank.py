"""One rank alone: nothing is compressed, and every mode gives the plain optimizer's bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from horovod_oktopk import Dense, OkTopk, Partial, StepAhead
from tests.scenarios.common import (
    SHAPES,
    N,
    flat,
    gradients,
    needs,
    needs_one_rank,
    shared_folder,
    take_steps,
    total,
    warned,
)
from tests.scenarios.driver import Kind, Trainer
from tests.support.schemes import SCHEMES

OKTOPK = OkTopk(density=0.1)
ON_HOSTS = replace(OKTOPK, hierarchical=True)
OF_GRADIENTS = SCHEMES | {"OkTopk, hosts": ON_HOSTS, "OkTopk, all sums": replace(OKTOPK, global_density=1.0)}
STEP_AHEAD = {name: StepAhead(scheme) for name, scheme in {**OF_GRADIENTS, "Dense": Dense()}.items()} | {
    "other options": StepAhead(OKTOPK, ahead=0.5, overlap=False, local_steps=3, gain=2.0)}
PARTIAL = {name: Partial(scheme, policy="solo") for name, scheme in {**SCHEMES, "Dense": Dense()}.items()}
STEPS = 5
HELD = np.random.default_rng(7).integers(-9, 10, (2, N)).astype(np.float32)
"""Residuals of two ranks."""


def noise(step: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    random = np.random.default_rng((3, step))
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def has_optimizer(kind: Kind) -> bool:
    return kind.name in ("optimizer", "keras", "core")


def assert_plain(kind: Kind, compressions: dict[str, Any], dtype: str = "float32", **arguments: Any) -> None:
    """Compare every step with that of the same optimizer without compression, and look at the report."""
    settings = {"dtype": dtype, "lr": 0.3, "momentum": 0.9, **arguments}
    plain = kind(kind.hvd.Compression.none, **settings)
    expected = []
    for step in range(STEPS):
        plain.step(noise(step, dtype))
        expected.append(flat(plain.values()).tobytes())
    for name, compression in compressions.items():
        trainer = kind(compression, **settings)
        for step in range(STEPS):
            trainer.step(noise(step, dtype))
            assert flat(trainer.own_values()).tobytes() == expected[step], f"{name}, step {step}"
            assert_all_is_kept(trainer, step + 1, name)
        trainer.synchronize_replicas()
        assert flat(trainer.values()).tobytes() == expected[-1], name
        assert not trainer.residual().any(), name


def assert_all_is_kept(trainer: Trainer, step: int, name: str) -> None:
    report = trainer.report()
    assert report is not None
    assert report.step == step, name
    assert report.finite, name
    kept = report.k, report.global_k, report.local_selected, report.global_selected
    assert kept == (N, N, N, N), f"{name}: {kept}"
    assert (report.bytes_sent, report.bytes_received, report.gain) == (0, 0, 1), name


def check_gives_the_plain_optimizers_bits(kind: Kind) -> None:
    needs_one_rank(kind.hvd)
    assert_plain(kind, OF_GRADIENTS)
    for dtype in ("float64", "float16"):
        assert_plain(kind, {"OkTopk": OKTOPK, "log4": replace(OKTOPK, value_dtype="log4")}, dtype, op=kind.hvd.Sum)


def check_gives_the_plain_optimizers_bits_with_step_ahead(kind: Kind) -> None:
    needs_one_rank(kind.hvd)
    needs(has_optimizer(kind), "an optimizer")
    assert_plain(kind, STEP_AHEAD)
    assert_plain(kind, {"StepAhead": StepAhead(OKTOPK)}, "float64", op=kind.hvd.Sum, normalizes=True)


def check_gives_the_plain_optimizers_bits_with_partial(kind: Kind) -> None:
    needs_one_rank(kind.hvd)
    needs(has_optimizer(kind) and kind.runs_partial, "an optimizer, and rounds")
    assert_plain(kind, PARTIAL)


def check_a_gradient_that_is_not_finite_is_the_plain_optimizers_affair(kind: Kind) -> None:
    """And the report tells."""
    needs_one_rank(kind.hvd)
    found = {}
    for name, compression in {"plain": kind.hvd.Compression.none, "OkTopk": OKTOPK,
                              **({"StepAhead": StepAhead(OKTOPK)} if has_optimizer(kind) else {})}.items():
        trainer, finite = kind(compression, momentum=0.9), []
        for step in range(3):
            grads = noise(step)
            if step == 1:
                grads["c.scale"][1, 1, 1] = np.nan
            trainer.step(grads)
            finite.append(name == "plain" or trainer.report().finite)
        assert finite == [True, name == "plain", True], name
        found[name] = flat(trainer.values())
    assert np.isnan(found["plain"]).sum() == 1
    for name, values in found.items():
        assert np.array_equal(values, found["plain"], equal_nan=True), name


def check_a_residual_of_several_ranks_is_applied_on_one(kind: Kind) -> None:
    """In full, in the first step, whatever the ranks had not sent; what follows is plain."""
    needs_one_rank(kind.hvd)
    compressions = {"OkTopk": OKTOPK, "OkTopk, hosts": ON_HOSTS, "OkTopk, log4": SCHEMES["OkTopk, log4"],
                    "GTopk": SCHEMES["GTopk"]}
    if has_optimizer(kind):
        compressions |= {"StepAhead": StepAhead(OKTOPK)}
        compressions |= {"Partial": Partial(OKTOPK, policy="solo")} if kind.runs_partial else {}
    for name, compression in compressions.items():
        with resumed(kind, compression) as trainer:
            for step in range(1, 4):
                take_steps(kind.hvd, trainer, step)
                trainer.synchronize_replicas()
                moved = HELD.sum(axis=0) + total(kind.hvd, *range(1, step + 1))
                assert np.array_equal(flat(trainer.values()), -moved), f"{name}, step {step}"
                assert not trainer.residual().any(), name
                assert_all_is_kept(trainer, step + 1, name)  # the file's was the first


def check_a_residual_waits_for_a_step_that_is_finite(kind: Kind) -> None:
    needs_one_rank(kind.hvd)
    grads = gradients(1, 0)
    grads["d"][0] = np.inf
    with resumed(kind, OKTOPK) as trainer:
        trainer.step(grads)
        assert not trainer.report().finite
        assert np.array_equal(trainer.residual(), HELD.sum(axis=0))
        trainer.assign({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
        take_steps(kind.hvd, trainer, 2)
        assert np.array_equal(flat(trainer.values()), -HELD.sum(axis=0) - total(kind.hvd, 2))
        assert not trainer.residual().any()


@contextmanager
def resumed(kind: Kind, compression: Any) -> Iterator[Trainer]:
    """Yield a trainer that loads what two ranks held after their first step."""
    with shared_folder(kind.hvd) as folder, warned():
        donor = kind(compression, op=kind.hvd.Sum)
        take_steps(kind.hvd, donor, 0)
        donor.synchronize_replicas()
        donor.save(f"{folder}/state")
        kind.rewrite(f"{folder}/state", list(HELD))
        trainer = kind(compression, op=kind.hvd.Sum)
        trainer.load(f"{folder}/state")
        yield trainer

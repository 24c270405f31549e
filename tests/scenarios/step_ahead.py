"""`compression=StepAhead(...)`: local steps, what they did is reduced, and nothing is lost."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from horovod_oktopk import Dense, GaussianK, GTopk, OkTopk, StepAhead, TopkA, TopkDSA
from tests.scenarios.common import (
    SHAPES,
    N,
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
from tests.scenarios.features import assert_like_stock
from tests.support.oracle import oracle_step

OPTIONS = StepAhead(OkTopk(density=0.1))
K = 7


class Oracle:
    """All ranks' parameters p and the shared ones w, in dense NumPy."""

    def __init__(self, size: int, ahead: float | None, local_steps: int, overlap: bool, global_density: Any) -> None:
        self.w, self.p, self.steps = np.zeros(N), np.zeros((size, N)), 0
        self.size, self.local_steps, self.overlap = size, local_steps, overlap
        self.coefficient = size**-0.25 if ahead is None else ahead
        self.global_k = K if global_density is None else K * size
        self.under_way: Any = None

    def step(self, moves: np.ndarray) -> None:
        self.steps += 1
        is_due = self.steps % self.local_steps == 0
        if is_due:
            self.catch_up()
        self.p = self.p - self.coefficient * moves
        if is_due:
            residuals = self.w - self.p
            update, kept, selected = oracle_step(residuals, K, self.global_k)
            sent = np.where(selected, residuals, 0)
            anticipated = (1 / self.coefficient - 1) * sent
            self.p = self.p - anticipated
            self.under_way = update / (self.coefficient * self.size), anticipated + np.where(kept, sent, 0)
            if not self.overlap:
                self.catch_up()

    def catch_up(self) -> None:
        if self.under_way is not None:
            update, returned = self.under_way
            self.w, self.p, self.under_way = self.w - update, self.p + returned - update, None


def random_gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    """Without ties, which other roundings would break in another way."""
    random = np.random.default_rng((step, rank))
    return {name: random.standard_normal(shape) for name, shape in SHAPES.items()}


def check_every_step_is_the_oracles(kind: Kind) -> None:
    """Frameworks and many ranks need more time, and have a part of the options. Who looks at w applies what is under
    way, so one run looks after every step, and another at the end alone."""
    rank, size = kind.hvd.rank(), kind.hvd.size()
    atol = 1e-6 if kind.name == "keras" else 1e-12  # a learning rate of Keras is float32
    options = list(itertools.product((None, 0.5, 1), (1, 3), (True, False), (None, "auto")))
    for (ahead, local_steps, overlap, kept), looks in itertools.product(
            options[::1 if kind.name == "core" and size <= 3 else 5], (False, True)):
        oracle = Oracle(size, ahead, local_steps, overlap, kept)
        scheme = OkTopk(density=K / N, value_dtype=None, global_density=kept)
        trainer = kind(StepAhead(scheme, ahead, overlap, local_steps), dtype="float64")
        for step in range(8):
            everyone = [random_gradients(step, each) for each in range(size)]
            trainer.step(everyone[rank])
            oracle.step(np.array([flat(each) for each in everyone]))
            np.testing.assert_allclose(flat(trainer.own_values()), oracle.p[rank], rtol=0, atol=atol)
            if looks or step == 7:
                oracle.catch_up()
                np.testing.assert_allclose(flat(trainer.values()), oracle.w, rtol=0, atol=atol)
                np.testing.assert_allclose(flat(trainer.own_values()), oracle.p[rank], rtol=0, atol=atol)


def check_dense_is_like_stock(kind: Kind) -> None:
    """Where all is sent at every step, and nothing is ahead; with the ranks' own momentum, too."""
    for scheme in (Dense(), OkTopk(density=1.0, value_dtype=None)):
        for op in (kind.hvd.Average, kind.hvd.Sum):
            assert_like_stock(kind, StepAhead(scheme, ahead=1, overlap=False), op=op, momentum=0.5)


def check_every_scheme_shares_or_holds_what_was_moved(kind: Kind) -> None:
    schemes = (OkTopk(density=0.1), OkTopk(density=0.1, selection="reuse"),
               OkTopk(density=0.1, value_dtype="bfloat16"), TopkA(density=0.1), TopkDSA(density=0.1),
               GTopk(density=0.1), GaussianK(density=0.1), Dense())
    for number, scheme in enumerate(schemes):
        options = StepAhead(scheme, overlap=number % 2 == 0, local_steps=3 if number % 4 == 3 else 1)
        trainer = kind(options, op=kind.hvd.Sum)
        for step in range(9):
            trainer.step(gradients(step, kind.hvd.rank()))
            assert_equal_everywhere(kind.hvd, trainer.values())
        values, held = flat(trainer.values()), sum(everywhere(kind.hvd, trainer.residual()))
        assert np.abs(values).max() > 0
        assert trainer.report().step == 9 // options.local_steps
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

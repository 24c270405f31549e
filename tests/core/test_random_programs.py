"""Whatever a program does between its steps: nothing is lost, nothing counts twice, all ranks share the same bits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk import StepAhead
from tests.core.driver import CoreTrainer, Kind
from tests.core.world import Hvd, run
from tests.support.schemes import SCHEMES

SHAPES = {"a": (7, 9), "b": (40,), "c": (1,), "d": (12, 25)}
AROUND = {"gradients": lambda scheme: scheme,
          "StepAhead": lambda scheme: StepAhead(scheme, gain=None),
          "StepAhead, no overlap": lambda scheme: StepAhead(scheme, overlap=False, ahead=1.0, gain=None),
          "StepAhead, two steps": lambda scheme: StepAhead(scheme, local_steps=2, gain=None)}
GRADIENTS = {"normal": lambda rng, n: rng.standard_normal(n),
             "ties that cancel": lambda rng, n: rng.choice([-1.0, 0.0, 1.0], n),
             "few": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.02),
             "none": lambda rng, n: np.zeros(n),
             "not finite": lambda rng, n: np.where(rng.random(n) < 1 / n, np.nan, rng.standard_normal(n))}
BETWEEN = ("density", "catch up", "records", "reload", "compare")
ACTIONS = st.lists(st.sampled_from([*GRADIENTS, *BETWEEN]), min_size=4, max_size=24)


class Program:
    """One rank's program: it takes steps of SGD with learning rate 1, and adds up the gradients that count."""

    def __init__(self, hvd: Hvd, options: Any, seed: int, folder: Path) -> None:
        self.hvd, self.options, self.folder = hvd, options, folder
        self.kind, self.rng = Kind(hvd), np.random.default_rng([seed, hvd.rank()])
        self.common = np.random.default_rng(seed)
        self.trainer = self.made()
        self.is_ahead, self.steps = isinstance(options, StepAhead), 0
        self.computed, self.magnitude = np.zeros((2, self.trainer.layout.n))

    def made(self) -> CoreTrainer:
        return self.kind(self.options, shapes=SHAPES)

    def act(self, action: str) -> None:
        if action in GRADIENTS:
            self.step(GRADIENTS[action](self.rng, len(self.computed)).astype(np.float32))
        elif action == "density":
            self.trainer.set_density(self.common.choice([None, 0.01, 0.3, 1.0]))
        elif action == "catch up":
            self.trainer.catch_up()
        elif action == "records" and self.steps:
            self.trainer.mode.records()
        elif action == "reload" and self.steps:
            self.reload()
        elif action == "compare":
            self.compare()

    def step(self, gradient: np.ndarray) -> None:
        before = self.trainer.own_values()
        parts = np.split(gradient, self.trainer.layout.offsets[1:-1])
        self.trainer.step({name: part.reshape(shape) for (name, shape, _), part
                           in zip(self.trainer.layout.entries, parts, strict=True)})
        self.steps += 1
        is_finite = bool(np.isfinite(gradient).all())
        if all(self.hvd.allgather_object(is_finite)) or (self.is_ahead and is_finite):
            self.computed += gradient
            self.magnitude += np.abs(gradient)
        elif not self.is_ahead or self.hvd.size() == 1:  # the step was not finite, and loss scaling would skip it
            self.trainer.assign(before)

    def reload(self) -> None:
        path, values = str(self.folder / f"{self.steps}"), self.trainer.values()
        self.trainer.save(path)
        self.trainer = self.made()
        self.trainer.assign(values)
        self.hvd.allgather_object(None)
        self.trainer.load(path)

    def compare(self) -> None:
        shared = np.concatenate([value.ravel() for value in self.trainer.values().values()])
        assert len({each.tobytes() for each in self.hvd.allgather_object(shared)}) == 1, "replicas differ"
        records, factor = self.trainer.mode.records(), 1.0
        residual = records[0]["residual"] if records else np.zeros_like(shared)
        if self.is_ahead:  # moves of λ times a step, in the residual and in the exchanges alike
            factor = self.trainer.mode.coefficient
        unsent, computed, magnitude = (sum(self.hvd.allgather_object(each.astype(np.float64)))
                                       for each in (residual, self.computed, self.magnitude))
        accounted = unsent / factor - self.hvd.size() * shared.astype(np.float64)
        tolerance = 1e-5 * (1 + self.steps) * (1 + magnitude)
        assert (np.abs(accounted - computed) <= tolerance).all(), "a gradient is lost, or there twice"


@given(st.integers(1, 5), st.sampled_from([*SCHEMES]), st.sampled_from([*AROUND]), ACTIONS, st.integers(0, 2**16))
def test_nothing_is_lost_and_all_ranks_share_the_same_bits(size: int, scheme: str, around: str, actions: list[str],
                                                           seed: int) -> None:
    options = AROUND[around](SCHEMES[scheme])
    with tempfile.TemporaryDirectory() as folder:
        def program(hvd: Hvd) -> None:
            one = Program(hvd, options, seed, Path(folder))
            for action in [*actions, "compare"]:
                one.act(action)
            one.kind.end()

        run(size, program)

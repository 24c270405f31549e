"""One rank that is left alone by the others of an elastic job, and meets them again: nothing is lost on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_oktopk import OkTopk, StepAhead
from horovod_oktopk.modes.gradient_mode import GradientMode
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.vectors.layout import Layout
from tests.modes.step_ahead.test_mode import Worker, moves
from tests.modes.test_gradient_mode import ENTRIES, OPTIONS, N, take_step
from tests.support.ranks import ElasticRanks
from tests.support.threads import run_ranks


def integers(step: int, rank: int) -> np.ndarray:
    return np.random.default_rng((step, rank)).integers(-64, 65, N).astype(np.float32)


def test_gradients_of_two_ranks_then_of_one_then_of_two_are_all_applied_or_held():
    def program(transport: Any) -> tuple[np.ndarray, ...]:
        layout, ranks, rank = Layout(ENTRIES), ElasticRanks(transport), transport.rank
        mode = GradientMode(OPTIONS, False, layout, lambda: NumpyAccumulator(layout.n, layout.dtype), ranks)
        together = sum(take_step(mode, integers(step, rank)) for step in range(3))
        held = mode.read_residual()
        ranks.become(is_alone=True)
        alone = take_step(mode, integers(3, rank))
        assert held.any()
        assert np.array_equal(alone, held + integers(3, rank)), "what was held is applied at once"
        assert not mode.read_residual().any()
        assert np.array_equal(take_step(mode, integers(4, rank)), integers(4, rank)), "and then what comes"
        assert (mode.report.step, mode.report.k) == (5, N)
        ranks.become(is_alone=False)
        again = sum(take_step(mode, integers(step, rank)) for step in range(5, 8))
        assert (mode.report.step, mode.report.k) == (8, mode.reduction.k)
        return together, held, again, mode.read_residual()

    together, held, again, after = map(np.array, zip(*run_ranks(2, program), strict=True))
    for update, residual, steps in ((together, held, range(3)), (again, after, range(5, 8))):
        assert np.array_equal(update[0], update[1])
        assert residual.any()
        computed = sum(integers(step, rank) for step in steps for rank in range(2))
        assert np.array_equal(update[0] + residual.sum(axis=0), computed)


@pytest.mark.parametrize("ahead", [1.0, 0.5])
def test_moves_of_two_ranks_then_of_one_then_of_two_are_all_shared_or_held(ahead):
    """Alone, a rank goes on from what all shared, less what it had not sent: the whole of it, as λ is 1 there."""
    def program(transport: Any) -> None:
        worker, mine = Worker(transport, StepAhead(OkTopk(density=0.05), ahead=ahead)), moves(transport.rank, 8)
        ranks = worker.ranks
        worker.take(mine[:3])
        worker.reducer.catch_up()
        shared, held = worker.w.copy(), worker.w - worker.p
        assert held.any()
        ranks.become(is_alone=True)
        worker.take(mine[3:5])
        np.testing.assert_allclose(worker.p, shared - held / ahead - mine[3:5].sum(axis=0), atol=1e-5)
        report = worker.reducer.report
        assert (report.step, report.k, worker.reducer.coefficient) == (5, len(shared), 1)
        assert not worker.reducer.records()[0]["residual"].any()
        ranks.become(is_alone=False)
        everywhere = np.split(broadcast(transport, worker.p), [200, 203])
        for own, of_first in zip(worker.parameters, everywhere, strict=True):
            own[:] = of_first
        start = worker.p
        worker.take(mine[5:])
        worker.reducer.catch_up()
        assert (worker.reducer.report.step, worker.reducer.coefficient) == (8, ahead)
        all_held = transport.allgather((worker.w - worker.p).astype(np.float64)).sum(axis=0)
        moved = sum(moves(rank, 8)[5:].sum(axis=0) for rank in range(2))
        np.testing.assert_allclose(2 * (start - worker.w) + all_held / ahead, moved, atol=1e-5)

    run_ranks(2, program)


def broadcast(transport: Any, values: np.ndarray) -> np.ndarray:
    """Return rank 0's values, as an elastic state hands them out."""
    first: np.ndarray = transport.allgather(values.astype(np.float64))[0].astype(np.float32)
    return first

"""GradientMode where each host is one worker, on ranks that are threads."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from horovod_oktopk import AgreementError, OkTopk
from horovod_oktopk.state import gather
from tests.modes.test_gradient_mode import OPTIONS, N, make, on_ranks, take_step, take_steps

ON_HOSTS = OkTopk(density=0.1, region_interval=5, hierarchical=2)


def gradients(steps, size, seed=0):
    """Return gradients of small whole numbers, whose sums are exact in any order."""
    return np.random.default_rng(seed).integers(-99, 100, (steps, size, N)).astype(np.float32)


def updated(reducer, own):
    """Return the sum of the updates of these steps."""
    return sum(take_step(reducer, gradient.copy()) for gradient in own)


@pytest.mark.parametrize("odd", [[1], [0, 1], [3], [0, 2]])
def test_ranks_that_come_to_differ_all_raise(odd):
    def program(transport):
        reducer = make(transport, options=ON_HOSTS)
        take_steps(reducer, transport.rank, range(2))
        if transport.rank in odd:
            reducer.set_density(0.2)
        residual, gradient = reducer.read_residual(), np.ones(N, np.float32)
        with pytest.raises(AgreementError, match="density"):
            take_step(reducer, gradient)
        assert (gradient == 1).all(), "no gradient was touched"
        assert np.array_equal(residual, reducer.read_residual())

    on_ranks(4, program)


@pytest.mark.parametrize(("former", "former_host", "size", "host"), [
    (4, 2, 4, False), (4, False, 4, 2), (4, 2, 4, 4), (6, 3, 4, 2), (2, False, 6, 2), (4, 2, 1, False)])
def test_another_shape_keeps_the_sum(former, former_host, size, host, tmp_path):
    given = gradients(5, former)

    def before(transport):
        reducer = make(transport, options=replace(OPTIONS, hierarchical=former_host))
        update = updated(reducer, given[:4, transport.rank])
        gather.save([reducer], tmp_path / "state")
        return update

    def after(transport):
        reducer = make(transport, options=replace(OPTIONS, hierarchical=host))
        gather.load(reducer, 0, tmp_path / "state")
        own = given[4, transport.rank::size].sum(axis=0)
        return updated(reducer, [own]), reducer.read_residual()

    sent, *_ = on_ranks(former, before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = on_ranks(size, after)
    assert np.array_equal(sent + found[0][0] + sum(residual for _, residual in found), given.sum(axis=(0, 1)))


def test_who_the_ranks_are_may_change():
    """The residual comes to those that keep it now."""
    given = gradients(6, 4)

    def program(transport):
        reducer = make(transport, options=ON_HOSTS)
        update = updated(reducer, given[:3, transport.rank])
        reducer.reduction.ranks.resets += 1
        return update + updated(reducer, given[3:, transport.rank]), reducer.read_residual()

    found = on_ranks(4, program)
    assert np.array_equal(found[0][0] + sum(residual for _, residual in found), given.sum(axis=(0, 1)))


@pytest.mark.filterwarnings("error")  # of a division by zero
def test_a_vector_without_elements_is_reduced():
    def program(transport):
        return len(take_step(make(transport, [], options=ON_HOSTS), np.empty(0)))

    assert on_ranks(4, program) == [0] * 4

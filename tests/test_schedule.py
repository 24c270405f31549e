"""Densities by epoch: what a schedule gives, and what is refused, where, and in which words."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_oktopk.errors import OptionError
from horovod_oktopk.schedule import GTOPK_DENSITIES, check_epoch, density_of_epoch

NAN = float("nan")


def test_the_default_is_what_gtopk_does_and_then_the_final_density():
    assert [density_of_epoch()(epoch) for epoch in range(6)] == [0.25, 0.0725, 0.015, 0.004, None, None]
    assert GTOPK_DENSITIES == (0.25, 0.0725, 0.015, 0.004)


def test_a_list_gives_the_first_epochs():
    assert [density_of_epoch([1.0, np.float32(0.5), 1])(epoch) for epoch in range(4)] == [1.0, 0.5, 1, None]


def test_a_list_that_changes_afterwards_changes_nothing():
    densities = [0.5]
    density_of = density_of_epoch(densities)
    densities[0] = 7.0
    assert density_of(0) == 0.5


def test_a_function_is_asked_for_every_epoch():
    density_of = density_of_epoch(lambda epoch: 1.0 if epoch == 0 else None if epoch > 2 else 0.5 / epoch)
    assert [density_of(epoch) for epoch in range(4)] == [1.0, 0.5, 0.25, None]


@pytest.mark.parametrize("schedule", [[], (), "", "0.25", b"1", None, 0.25, {0: 0.25}, {0.25}, np.array([])],
                         ids=repr)
def test_what_is_neither_a_sequence_nor_a_function_is_refused(schedule):
    with pytest.raises(OptionError, match="at least one density, or a function of the epoch") as error:
        density_of_epoch(schedule)
    assert repr(schedule) in str(error.value)


@pytest.mark.parametrize("density", [0, -0.1, 1.0001, NAN, float("inf"), "0.1", None, True, [0.1], 1j], ids=repr)
def test_a_bad_density_is_refused_at_once_with_its_epoch(density):
    with pytest.raises(OptionError, match=r"the density of epoch 1 must be a number in \(0, 1\]") as error:
        density_of_epoch([0.5, density])
    assert repr(density) in str(error.value)


@pytest.mark.parametrize("density", [0, -0.1, 1.0001, NAN, float("inf"), "0.1", True, [0.1]], ids=repr)
def test_a_bad_result_of_a_function_is_refused_with_its_epoch(density):
    density_of = density_of_epoch(lambda epoch: density if epoch == 3 else 0.5)
    assert density_of(2) == 0.5
    with pytest.raises(OptionError, match=r"gives for epoch 3 must be a number in \(0, 1\]") as error:
        density_of(3)
    assert repr(density) in str(error.value)


def test_an_epoch_is_an_integer_from_zero():
    assert check_epoch(np.int64(3)) == 3
    assert type(check_epoch(np.int64(3))) is int
    for epoch in (-1, 0.5, True, "2", None):
        with pytest.raises(OptionError, match="integer of at least 0"):
            check_epoch(epoch)

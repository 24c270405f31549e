"""Options: what is not allowed raises OptionError that names the value and what is allowed."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_oktopk import OkTopk, StepAhead, warmup_density
from horovod_oktopk.errors import OkTopkError, OptionError, PluginError

BAD = [
    *[("density", value, "(0, 1]") for value in (0, -1, 1.5, float("nan"), float("inf"), 10**400, "a", True, [0.1])],
    *[("global_density", value, "(0, 1]") for value in (0, -1, 1.5, float("nan"), "a", True, [0.1])],
    *[(name, value, "an integer of at least 1") for name in ("threshold_interval", "region_interval")
      for value in (0, -3, 1.5, True, "8", float("nan"), None)],
    *[("selection", value, "('exact', 'reuse')") for value in ("approximate", None, 1)],
    *[("value_dtype", value, "(None, 'auto', 'bfloat16', 'log4')")
      for value in ("float16", np.float16, 16, [])],
    *[("transport", value, "('auto', 'mpi', 'horovod')") for value in ("tcp", "", None, 3, [])],
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD, ids=[f"{name}={value!r}" for name, value, _ in BAD])
def test_a_bad_value_is_refused_by_name(name, value, allowed):
    with pytest.raises(OptionError) as error:
        OkTopk(**{name: value})
    for part in (name, allowed, repr(value)):
        assert part in str(error.value)


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="densty"):
        OkTopk(densty=0.1)


def test_option_errors_are_value_errors_of_this_package():
    assert issubclass(OptionError, ValueError)
    assert issubclass(OptionError, OkTopkError)


def test_options_are_frozen():
    with pytest.raises(AttributeError):
        OkTopk().density = 0.5


@pytest.mark.parametrize(("options", "n", "k"), [
    ({}, 1000, 10), ({}, 3, 1), ({"density": 1}, 7, 7), ({"density": 1e-9}, 100, 1), ({"density": 0.5}, 5, 2),
    ({"density": np.float32(0.25)}, 8, 2)])
def test_k_of_n_elements(options, n, k):
    assert OkTopk(**options).k_of(n) == k


def test_the_algorithm_gets_the_options():
    algorithm = OkTopk(density=0.1, global_density=0.2, value_dtype="bfloat16").algorithm()
    assert (algorithm.value_dtype, algorithm.global_k(10, 100, 4)) == ("bfloat16", 20)


def test_settings_hold_all_options_by_name():
    assert OkTopk(density=0.2).settings() == {
        "density": 0.2, "transport": "auto", "hierarchical": False,
        "selection": "exact", "global_density": "1 times the density", "value_dtype": None,
        "threshold_interval": 32, "region_interval": 64}


def test_the_density_that_was_given_comes_back():
    options = OkTopk(density=0.2, region_interval=3)
    changed = options.with_density(0.5).with_density(0.3)
    assert (changed.density, changed.region_interval) == (0.3, 3)
    assert changed.with_density(None).density == 0.2
    assert changed.settings() == OkTopk(density=0.3, region_interval=3).settings()


@pytest.mark.parametrize(("options", "k", "n", "size", "global_k"), [
    ({}, 10, 1000, 8, 10), ({"density": 0.01, "global_density": 0.04}, 10, 1000, 8, 40),
    ({"density": 0.01, "global_density": 0.04}, 10, 1000, 3, 30),  # P k: all that is sent
    ({"density": 0.0015, "global_density": 0.004}, 2, 1000, 8, 4),  # of n, not twice and a half of a rounded k
    ({"density": 0.04, "global_density": 0.01}, 40, 1000, 8, 10),
    ({"density": 0.5, "global_density": 1e-9}, 5, 9, 2, 1), ({"density": 0.5, "global_density": 1.0}, 5, 10, 8, 10),
    ({"global_density": None}, 10, 1000, 8, 10)])
def test_k_of_the_sum(options, k, n, size, global_k):
    assert OkTopk(**options).global_k_of(k, n, size) == global_k


@pytest.mark.parametrize(("options", "value_dtype", "global_k"), [
    ({}, "log4", 80), ({"value_dtype": None}, None, 80), ({"value_dtype": "bfloat16"}, "bfloat16", 80),
    ({"global_density": None}, "log4", 10), ({"global_density": 0.03}, "log4", 30), ({"density": 0.5}, "log4", 1000)])
def test_what_is_left_open_suits_parameters_in_step_ahead(options, value_dtype, global_k):
    given = OkTopk(**options)
    for each in (given, given.with_density(0.2).with_density(None)):
        found = each.wire_dtype("parameters"), each.global_k_of(each.k_of(1000), 1000, 8, "parameters")
        assert found == (value_dtype, global_k)
        assert options or each.global_k_of(10, 1000, 64, "parameters") == 320
    assert given.wire_dtype() == options.get("value_dtype")
    assert OkTopk().settings("parameters")["global_density"] == "32 times the density"


def test_the_global_density_keeps_its_ratio_to_the_density():
    options = OkTopk(density=0.01, global_density=0.04)
    dense = options.with_density(1.0)
    for each in (options, dense, dense.with_density(None), dense.with_density(0.5).with_density(0.002)):
        assert [each.global_k_of(k, 1000, 8) for k in (2, 10, 100, 500, 1000)] == [8, 40, 400, 1000, 1000]
    assert options.global_k_of(10, 10, 8) == 10  # density 1, where the density that was given is less than 1 of n


def test_settings_tell_global_densities_apart_that_differ_in_their_ratio():
    one, other = OkTopk(density=0.01, global_density=0.04), OkTopk(density=0.02, global_density=0.04)
    assert one.with_density(0.02).settings() != other.settings()
    assert one.settings()["global_density"] == "0.04 at density 0.01"


def test_options_are_of_a_kind_if_the_ratio_of_the_densities_is_the_same():
    same, *others = (options.settings_but_density() for options in (
        OkTopk(density=0.1, global_density=0.3), OkTopk(density=0.1, global_density=0.2), OkTopk(density=0.1),
        OkTopk(density=0.1, selection="reuse")))
    assert same == OkTopk(density=0.01, global_density=0.03).settings_but_density()
    assert same not in others
    assert others[1] == OkTopk(density=0.2).settings_but_density() != others[2]


def test_a_lone_tensor_is_refused_instead_of_going_dense():
    with pytest.raises(PluginError, match="DistributedOptimizer"):
        OkTopk().compress(np.zeros(3))


def test_densities_of_the_first_epochs_come_one_by_one_and_then_that_of_the_options():
    assert [warmup_density(epoch) for epoch in range(6)] == [0.25, 0.0725, 0.015, 0.004, None, None]
    assert [warmup_density(np.int64(epoch), [1.0, 0.5]) for epoch in range(3)] == [1.0, 0.5, None]
    for epoch in (-1, 0.5, True, "2", None):
        with pytest.raises(OptionError, match="epoch must be an integer of at least 0"):
            warmup_density(epoch)


@pytest.mark.parametrize("make", [lambda array: OkTopk(global_density=array), lambda array: OkTopk(density=array),
                                  lambda array: StepAhead(OkTopk(), gain=array)])
def test_an_array_is_refused_in_words(make):
    with pytest.raises(OptionError, match="must be a number"):
        make(np.ones(2))


def test_a_density_of_16_bits_selects_as_many():
    assert OkTopk(density=np.float16(0.01)).k_of(10_000_000) == round(float(np.float16(0.01)) * 10_000_000)

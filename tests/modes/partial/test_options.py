"""`Partial` takes what a round runs as users write it, and gives it as a scheme."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

from horovod_oktopk import Dense, OkTopk, OptionError, Partial, TopkA
from horovod_oktopk.schemes.dense import DenseSum


@pytest.mark.parametrize(("options", "kind"), [
    (Partial(), OkTopk), (Partial(Dense), DenseSum), (Partial(Dense()), DenseSum), (Partial(TopkA), TopkA),
    (Partial(inner=TopkA(density=0.3)), TopkA), (replace(Partial(Dense), inner=OkTopk), OkTopk)])
def test_inner_is_a_scheme_also_in_copies(options, kind):
    for each in (options, copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert type(each.scheme) is kind


def test_anything_else_is_refused():
    with pytest.raises(OptionError, match=r"Partial takes Dense\(\), OkTopk\(...\) or another scheme; got 'solo'"):
        Partial("solo")

"""Bits of trained models: they are those that were recorded, and a redesign changes none of them."""

from __future__ import annotations

import json

import pytest

from tests.core.digests import RECORDED, digest_of, names

DIGESTS = json.loads(RECORDED.read_text())


def test_every_case_is_recorded() -> None:
    assert sorted(DIGESTS) == sorted(names())


@pytest.mark.parametrize("name", names())
def test_digest(name: str) -> None:
    assert digest_of(*names()[name]) == DIGESTS[name], (
        f"{name}: parameters or residuals have other bits than recorded. If they are meant to, record them anew: "
        "python -m tests.core.digests")

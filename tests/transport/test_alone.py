"""The transport of a single rank."""

from __future__ import annotations

import pytest

from horovod_oktopk.transport.collectives import AloneTransport

from .programs import PROGRAMS, WITH_SIGNALS


@pytest.mark.parametrize("program", PROGRAMS | WITH_SIGNALS)
def test_conformance(program):
    (PROGRAMS | WITH_SIGNALS)[program](AloneTransport())

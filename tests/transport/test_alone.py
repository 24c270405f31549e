"""The transport of a single rank."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_oktopk.errors import TransportError
from horovod_oktopk.transport.base import AloneTransport

from .programs import PROGRAMS, WITH_SIGNALS


@pytest.mark.parametrize("program", PROGRAMS | WITH_SIGNALS)
def test_conformance(program):
    (PROGRAMS | WITH_SIGNALS)[program](AloneTransport())


def test_messages_that_have_nowhere_to_go_are_refused():
    alone, message = AloneTransport(), np.zeros(4, np.uint8)
    with pytest.raises(TransportError, match=r"some to \[1\]"):
        alone.exchange({1: message}, {})
    with pytest.raises(TransportError, match=r"from \[1\]"):
        alone.exchange({}, {1: 4})
    with pytest.raises(TransportError, match="3 bytes were announced; got 4"):
        alone.allgatherv(message, np.array([3]))

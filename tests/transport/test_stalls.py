"""A call that waits for long in a library's collective is told, again and again, and one that returns is not."""

from __future__ import annotations

import time

import pytest

from horovod_oktopk.transport import stalls


def test_a_call_that_waits_for_long_is_told(monkeypatch: pytest.MonkeyPatch,
                                            caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.05")
    monkeypatch.setattr(stalls, "LOOK", 0.01)
    stalls._watch.cache_clear()
    with stalls.noticed(stalls.StallWarning("rank 0 of 2").note_wait):
        pass
    with stalls.noticed(stalls.StallWarning("rank 1 of 2").note_wait):
        for _ in range(1000):  # at most ten seconds
            if len(caplog.messages) >= 2:
                break
            time.sleep(0.01)
    assert len(caplog.messages) >= 2
    assert all(message.startswith("stalled: rank 1 of 2 has waited") for message in caplog.messages)
    assert not stalls._waiting

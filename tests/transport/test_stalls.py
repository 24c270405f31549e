"""A call that waits for long in a library's collective is told, again and again, and one that returns is not."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from horovod_oktopk.transport import stalls
from tests.launch import ROOT


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


ENDS_DURING_A_LOOK = """
import threading, time
from horovod_oktopk.transport import stalls

has_begun = threading.Event()

def look(_):
    has_begun.set()
    time.sleep(0.5)
    print("has looked", flush=True)

with stalls.noticed(look):
    has_begun.wait(60)
"""


def test_the_process_ends_after_a_look_that_has_begun() -> None:
    """A look may be in a library's C++, from which no thread may come back to an interpreter that has ended."""
    ended = subprocess.run([sys.executable, "-c", ENDS_DURING_A_LOOK], capture_output=True, text=True, check=True,
                           cwd=ROOT, timeout=120)
    assert ended.stdout == "has looked\n"

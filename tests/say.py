"""Lines that a rank says to the test that has started its job."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write a line in one piece: print writes the end of a line by itself where Python does not buffer.

    torchrun and horovodrun start ranks so, and all of a job's ranks may write into one pipe.
    """
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()

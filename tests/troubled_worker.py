"""A rank of a test job (see worker.py) which crashes or hangs at its end, as TROUBLE in its environment says."""

from __future__ import annotations

import atexit
import os
import time

from tests import worker

if __name__ == "__main__":
    worker.main()
    if os.environ["TROUBLE"] == "crash":
        atexit.register(os._exit, 3)  # what is registered last is called first
    elif os.environ["TROUBLE"] == "hang":
        atexit.register(time.sleep, 600)

"""`density="auto"`: the largest density whose steps take at most 5 % longer than those of the smallest.

It is measured and not computed: a step's time has everything in it that a user waits for. Rank 0 decides, and tells
its decision in a roll call, so that all ranks change at the same step.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Generator, Sequence
from time import perf_counter

logger = logging.getLogger("horovod_oktopk")

SLACK = 1.05
"""The multiple of the smallest density's time that a step may take."""
SKIPPED, COUNTED = 4, 24
"""Steps of a level that are not counted, as they still have exchanges of the level before; and those that are."""
FIRST_REST, LAST_REST = 500, 16_000
"""Steps at a level that was found, until the levels are tried again; each time twice as many."""
SETTLED = "density settled at %.3g %%: %.4f s a step, %.4f s at %.3g %%"


def search(densities: Sequence[float], level: int = 0,
           note: Callable[[int], object] = lambda _: None) -> Generator[int, float, None]:
    """Yield the level of each step, and be sent its seconds, for ever; begin at a level that was found before.

    Levels are numbers of densities. They go up by two while they cost nothing, and by one at last. Each that is
    found is noted.
    """
    rest = FIRST_REST
    if level:
        yield from _measured(level, rest)
    while True:
        least = yield from _measured(0)
        level, seconds = yield from _climb(level, len(densities) - 1, SLACK * least)
        note(level)
        logger.info(SETTLED, 100 * densities[level], seconds or least, least, 100 * densities[0])
        yield from _measured(level, rest)
        rest = min(2 * rest, LAST_REST)


def _climb(level: int, top: int, limit: float) -> Generator[int, float, tuple[int, float]]:
    """Return the largest level up to the top within the limit, from a level on, and its seconds: 0 for the least."""
    seconds = 0.0
    while level and (seconds := (yield from _measured(level))) > limit:
        level, seconds = level - 1, 0.0
    while level < top and (found := (yield from _measured(min(level + 2, top)))) <= limit:
        level, seconds = min(level + 2, top), found
    if level < top and (found := (yield from _measured(level + 1))) <= limit:
        level, seconds = level + 1, found
    return level, seconds


def _measured(level: int, steps: int | None = None) -> Generator[int, float, float]:
    """Take steps at a level, as many as are needed to measure; return the median of their seconds."""
    seconds = []
    for _ in range(SKIPPED + COUNTED if steps is None else steps):
        seconds.append((yield level))
    return statistics.median(seconds[SKIPPED:])


class DensityControl:
    """The level of one reduction: the least until another is heard, also where the search begins at another one.

    Levels are numbers of a scheme's densities. A start beyond the last level is the last one. `search` decides;
    `found` is the level that it has found last, for a checkpoint: the present one may be one that is being tried.
    Rank 0 calls `note_step`, and its `told` is what all ranks, rank 0 too, `hear`.
    """

    clock = staticmethod(perf_counter)

    def __init__(self, densities: Sequence[float], start: int = 0) -> None:
        self.densities, self.level, self.found = densities, 0, min(start, len(densities) - 1)
        self._search = search(densities, self.found, self._note)
        self._wanted, self._last = next(self._search), 0.0

    @property
    def density(self) -> float:
        return self.densities[self.level]

    def _note(self, level: int) -> None:
        self.found = level

    def note_step(self) -> None:
        """Take note that a step is over: the time since the last one is its time."""
        now = self.clock()
        if self._last:
            self._wanted = self._search.send(now - self._last)
        self._last = now

    @property
    def told(self) -> int:
        """The number of the level to change to, plus one; 0 if it stays."""
        return 0 if self._wanted == self.level else self._wanted + 1

    def hear(self, told: int) -> bool:
        """Change the level, as rank 0 has told; return True if it is another one."""
        if told:
            self.level = told - 1
        return told > 0

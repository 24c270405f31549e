"""Horovod's elastic states: each gets a class of its own, which counts how often ranks may have changed."""

from __future__ import annotations

import functools
from typing import Any

from .horovod import HorovodRanks

_mixins: list[tuple[type, type]] = []


class ElasticState:
    """The mixin of any elastic state of Horovod. It counts how often ranks may have changed."""

    def on_reset(self) -> None:
        HorovodRanks.resets += 1
        super().on_reset()  # type: ignore[misc]

    def _when_made(self) -> None:
        """Save anew what the constructor has saved before the state had its class; nothing here."""


@functools.cache
def _own_class(plain: type) -> type:
    mixin = next((mixin for state, mixin in _mixins if issubclass(plain, state)), ElasticState)
    return type(plain.__name__, (mixin, plain), {"__module__": plain.__module__})


def extend_elastic(base: Any, state: type, mixin: type[ElasticState]) -> None:
    """Wrap the constructor of all elastic states, so that each gets a class of its own: its mixin, then its class.

    `base` is horovod.common.elastic.State, which is wrapped once. States of the class `state` get this mixin; all
    others get ElasticState alone.
    """
    _mixins.append((state, mixin))
    _own_class.cache_clear()  # a class may have been made of a state whose mixin was not known
    make = base.__init__
    if hasattr(make, "_oktopk_installed"):
        return

    @functools.wraps(make)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if not isinstance(self, ElasticState):
            self.__class__ = _own_class(type(self))  # type: ignore[arg-type]
        self._when_made()

    wrapped._oktopk_installed = True  # type: ignore[attr-defined]
    base.__init__ = wrapped

"""Horovod's elastic states: a class of its own for each, which keeps what belongs to this rank."""

from __future__ import annotations

import functools
from typing import Any

from ..transport.horovod import note_reset

_mixins: list[tuple[type, type]] = []


class ElasticState:
    """The mixin of any elastic state. It counts how often ranks may have changed."""

    def on_reset(self) -> None:
        """Note that ranks may have changed."""
        note_reset()
        super().on_reset()  # type: ignore[misc]

    def _note_own(self) -> None:
        """Note what belongs to this rank alone, when the state is made; nothing here."""


def extend_elastic(base: Any, state: type, mixin: type[ElasticState]) -> None:
    """Wrap the constructor of all elastic states, so that each gets a class of its own: its mixin, then its class.

    base: horovod.common.elastic.State, which is wrapped once. state: the class of states that get this mixin; all
    others get ElasticState alone.
    """
    _mixins.append((state, mixin))
    make = base.__init__
    if hasattr(make, "_oktopk_installed"):
        return

    @functools.wraps(make)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        plain = type(self)
        if not issubclass(plain, ElasticState):
            first = next((mixin for cls, mixin in _mixins if isinstance(self, cls)), ElasticState)
            self.__class__ = type(plain.__name__, (first, plain), {"__module__": plain.__module__})
            self._note_own()

    wrapped._oktopk_installed = True  # type: ignore[attr-defined]
    base.__init__ = wrapped

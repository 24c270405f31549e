"""Steps in a graph of TensorFlow 1: one `session.run` may take several at once, in an order that differs from rank
to rank, and with as few as one thread. A step that waited for other ranks in that thread would keep it from the
step which those wait for.

So a step is first handed in. Then one of Horovod's asynchronous operations waits, without a thread, until all ranks
have handed theirs in. Only then a thread of the session may wait; and while it does, it takes whatever step the first
rank has come to.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
from numpy.typing import NDArray

import tensorflow as tf

from ..errors import PluginError
from .graphs import present_graphs
from .transport import TensorFlowCollectives

Array = NDArray[Any]
Step = Callable[..., list[Array]]
"""From the values of tensors to those of others."""

_places: weakref.WeakKeyDictionary[tf.Graph, Iterator[int]] = weakref.WeakKeyDictionary()


class Turns:
    """The steps that the sessions of this process take with the ranks of one process set, one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handed_in: dict[int, Callable[[], list[Array]]] = {}
        self._taken: dict[int, list[Array]] = {}

    def hand_in(self, place: int, step: Step, *inputs: Array) -> list[Array]:
        """Takes note of a step, whose place in the graph is its name; never waits."""
        self._taken.pop(place, None)
        self._handed_in[place] = partial(step, *inputs)
        return [np.array(place, np.int32)]

    def take(self, place: int, process_set: Any) -> list[Array]:
        """What a step gives that all ranks have handed in. Steps come in the order of the first rank."""
        with self._lock:
            while place not in self._taken:
                if place not in self._handed_in:
                    raise PluginError("another step of the same session.run has failed")
                ranks = TensorFlowCollectives(process_set, 0)
                self._take_one(int(ranks.allgather(np.array([place], np.int64))[0]))
            return self._taken.pop(place)

    def _take_one(self, place: int) -> None:
        try:
            self._taken[place] = self._handed_in.pop(place)()
        except BaseException:  # on all ranks: whatever they were waiting for, none waits any longer
            self._handed_in.clear()
            self._taken.clear()
            raise


_turns: defaultdict[int, Turns] = defaultdict(Turns)


def in_session() -> bool:
    """Whether the graph that is being built is TensorFlow 1's, or lies in one."""
    return not tf.compat.v1.executing_eagerly_outside_functions()


def in_turn(call: Callable[..., list[tf.Tensor]], step: Step, inputs: list[tf.Tensor], like: list[tf.Tensor],
            process_set: Any) -> list[tf.Tensor]:
    """The step in a graph of TensorFlow 1. call: makes an operation of a function; like: has the results' shapes."""
    place = next(_places.setdefault(present_graphs()[-1], itertools.count()))
    turns = _turns[process_set.process_set_id]
    [handed_in] = call(partial(turns.hand_in, place, step), inputs, [tf.int32], [tf.TensorShape([])])
    with tf.device("/cpu:0"):
        everywhere = hvd.allgather(tf.reshape(handed_in, [1]), name=f"HorovodAllgather_oktopk.{place}",
                                   ignore_name_scope=True, process_set=process_set)
    # It has an input that is no constant, and its output is one, as TensorFlow takes it for an operation without a
    # side effect: it would gather a constant once and for all, and leave out what is a control dependency only.
    return call(lambda _: turns.take(place, process_set), [everywhere], [t.dtype for t in like],
                [t.shape for t in like])

"""Keras 3: `compression=Partial(...)`. A step hands in its gradients, and applies the updates of all rounds since the
last, each as a step of the plain optimizer with the learning rate that belongs to its round.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from horovod_oktopk.errors import PluginError
from horovod_oktopk.partial.options import Partial
from horovod_oktopk.partial.outcomes import RoundUpdate
from horovod_oktopk.partial.reducer import PartialReducer as FlatPartialReducer
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.tensorflow.layout import TensorLayout
from horovod_oktopk.tensorflow.reducer import Reducer, call, check_place, is_dense, weakly
from horovod_oktopk.tensorflow.registry import GradientReducer, tensor_of
from horovod_oktopk.tensorflow.transport import ranks_of

Array = NDArray[Any]
Update = Callable[[list[Any]], object]
"""Applies gradients, one for each variable, by the plain optimizer."""


class PartialGradientReducer(GradientReducer):
    """The GradientReducer of one optimizer, whose steps apply several updates, or none."""

    def __init__(self, options: Partial, op: Any, process_set: Any, sparse_as_dense: bool, optimizer: Any) -> None:
        super().__init__(options.scheme, op, process_set, sparse_as_dense, sparse=None)
        self.partial = options
        self._optimizer = weakref.ref(optimizer)

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def apply(self, grads: Sequence[Any], variables: Sequence[Any], update: Update) -> None:
        """One step, in a graph or eagerly."""
        if not self.takes_part:
            update(list(grads))
            return
        check_place()
        if self._sparse_as_dense:
            grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        if any(isinstance(g, tf.IndexedSlices) for g in grads):
            raise PluginError("sparse gradients go by Horovod's own allgather, which waits for all ranks: with "
                              "Partial give sparse_as_dense=True")
        reducer, _, reason = self.reducer_for(list(variables), grads)
        if reason:  # this rank alone raises: the others' rounds go on, and wait for it in the end
            raise PluginError(reason)
        assert isinstance(reducer, PartialReducer)
        reducer.step(grads, self._rate(), update)

    def synchronize_replicas(self) -> None:
        """Serves rounds until all ranks are here, and applies their updates as they end; on all ranks together."""
        rate = self._rate()
        mine = None if rate is None else tf.identity(rate)
        for reducer in self.present_reducers().values():
            assert isinstance(reducer, PartialReducer)
            reducer.synchronize_replicas(rate)
        if rate is not None:
            rate.assign(mine)

    def _rate(self) -> tf.Variable | None:
        """The learning rate, where it is a variable; a schedule follows the updates, which are the same on all
        ranks."""
        optimizer = self._optimizer()
        rate = getattr(getattr(optimizer, "_learning_rate", None), "value", None)
        return rate if isinstance(rate, tf.Variable) else None

    def _make(self, variables: list[Any], grads: Sequence[Any]) -> Reducer:
        return PartialReducer(replace(self.partial, inner=self.options), self.op, self.process_set, variables, grads)


class PartialReducer(Reducer):
    """Takes the steps of one list of variables; on every rank of the process set."""

    flat: FlatPartialReducer[TensorLayout]

    def __init__(self, options: Partial, op: Any, process_set: Any, variables: Sequence[Any],
                 gradients: Sequence[Any]) -> None:
        self.partial = options
        self._variables = [weakref.ref(tensor_of(variable)) for variable in variables]
        self._is_dense = [is_dense(g) for g in gradients]
        self._update: Update
        self._updates: deque[RoundUpdate] = deque()
        self._process_set = process_set
        super().__init__(options.scheme, op, process_set, variables, gradients)

    def _make_flat(self, _options: Any, average: bool, layout: TensorLayout, process_set: Any,
                   ) -> FlatPartialReducer[TensorLayout]:
        self._dtypes = [tf.as_dtype(dtype) for _, _, dtype in layout.entries]
        self._shapes = [tf.TensorShape(shape) for _, shape, _ in layout.entries]
        flat = FlatPartialReducer(self.partial, average, layout, lambda part: NumpyAccumulator(part.n, part.dtype),
                                  ranks_of(process_set, own_channel=True, yield_cpu=True), ["learning_rate"])
        flat.belongs_to(self)
        return flat

    def step(self, grads: Sequence[Any], rate: tf.Variable | None, update: Update) -> None:
        """Hands in the gradients; `update` is called for every round. rate: the learning rate, which a round sets."""
        self._update = update
        mine = tf.constant(0.0, tf.float64) if rate is None else tf.cast(rate, tf.float64)
        [count] = call(weakly(self._arrive), [mine, *(g for g in grads if is_dense(g))], [tf.int32])
        if tf.executing_eagerly():
            for _ in range(int(count)):
                self._apply_next(rate)
        else:
            tf.while_loop(lambda i: i < count, lambda i: self._apply_next(rate, after=i), [tf.constant(0)],
                          parallel_iterations=1)
        if rate is not None:
            rate.assign(tf.cast(mine, rate.dtype))

    def synchronize_replicas(self, rate: tf.Variable | None) -> None:
        """Serves rounds until all ranks are here, and applies them; leaves the last round's learning rate."""
        for updates in self.flat.synchronize_replicas():
            self._updates.extend(updates)
            while self._updates:
                self._apply_next(rate)
        for index, ref in enumerate(() if self.partial.in_order else self._variables):
            variable = ref()
            if variable is not None:
                variable.assign(hvd.allreduce(variable, op=hvd.Average, name=f"horovod_oktopk.model.{index}",
                                              process_set=self._process_set))

    def _arrive(self, rate: Array, *gradients: Array) -> list[Array]:
        if self.before_step is not None:
            self.before_step(self.flat)
            self.before_step = None
        self._updates.extend(self.flat.arrive(self.flat.layout.pieces(gradients), [float(rate)]))
        return [np.array(len(self._updates), np.int32)]

    def _apply_next(self, rate: tf.Variable | None, after: Any = None) -> Any:
        """One update. after: how many there have been in this step, in a graph; returns one more."""
        inputs = [] if after is None else [after]
        of_round, *dense = call(weakly(self._next), inputs, [tf.float64, *self._dtypes],
                                [tf.TensorShape(()), *self._shapes])
        if rate is not None:
            rate.assign(tf.cast(of_round, rate.dtype))
        given = iter(dense)
        self._update([next(given) if each else None for each in self._is_dense])
        return None if after is None else after + 1

    def _next(self, *_: Array) -> list[Array]:
        each = self._updates.popleft()
        with self.flat.applying():
            entries = zip(self._shapes, self._dtypes, strict=True)
            memory = [np.empty(shape.as_list(), dtype.as_numpy_dtype) for shape, dtype in entries]
            arrays = self.flat.layout.write(each.update, memory.__getitem__)
        return [np.array(each.settings[0]), *arrays]

"""The gradients of several backward passes, which are added up before a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod_oktopk.errors import PluginError
from horovod_oktopk.tensorflow.variables import ByVariables, check_variables, key_of, name_of, tensor_of

SPARSE = ("the gradients of several backward passes are added up as dense ones, and that of '{name}' is sparse: give "
          "sparse_as_dense=True, or backward_passes_per_step=1")


class Passes:
    """The passes of one optimizer, `number` of them before each step: each list of variables has sums of its own.

    The gradients of a step are divided by the number of passes if `average`.
    """

    def __init__(self, number: int, average: bool, sparse_as_dense: bool) -> None:
        self.number, self._average, self._sparse_as_dense = number, average, sparse_as_dense
        self._sums: ByVariables[Sums] = ByVariables()

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tf.Tensor:
        """Add up a pass's gradients; return how many passes there are in the sums."""
        for gradient, variable in zip(gradients, variables, strict=True):
            if isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense:
                raise PluginError(SPARSE.format(name=name_of(variable)))
        key = key_of(variables)
        if key not in self._sums:
            check_variables(variables)
            self._sums.keep(variables, Sums(variables))
        return self._sums[key].add(gradients)

    def taken(self, reduce: Callable[[Sequence[Any], Sequence[Any]], list[Any]], variables: Sequence[Any],
              ) -> list[Any]:
        """Return the sums as `reduce` reduces them, which begin anew."""
        reduced = reduce(self._sums[key_of(variables)].take(), variables)
        return [gradient / self.number for gradient in reduced] if self._average else reduced


class Sums:
    """The sums of the gradients of some variables, and the number of passes in them."""

    def __init__(self, variables: Sequence[Any]) -> None:
        with tf.init_scope():  # a function that was traced for other variables makes no more of its own
            self._count = tf.Variable(0, trainable=False)
            self._sums = [tf.Variable(tf.zeros(tensor.shape, tensor.dtype), trainable=False)
                          for tensor in map(tensor_of, variables)]

    def add(self, gradients: Sequence[Any]) -> tf.Tensor:
        """Add a pass's gradients, of which None is zero; return the number of passes."""
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype), read_value=False)
        return self._count.assign_add(1).read_value()

    def take(self) -> list[tf.Tensor]:
        """Return the sums, and begin anew."""
        taken = [tf.identity(total) for total in self._sums]
        for total in self._sums:
            total.assign(tf.zeros_like(total), read_value=False)
        self._count.assign(0)
        return taken

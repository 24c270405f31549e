"""The optimizer's own step of step-ahead error feedback: which gradients it is given, as inputs of a Python function;
and what of them is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_oktopk.step_ahead.noise import Gather, elements_of_rows, gather_by_parts, normalizes
from horovod_oktopk.tensorflow.registry import tensor_of
from horovod_oktopk.vectors.sparse import Indices, Values

Pairs = Sequence[tuple[Any, Any]]
"""A gradient and its variable."""


def normalizes_gradients(optimizer: Any) -> bool:
    """Whether an optimizer's steps do not grow with its gradients, and one step's gradients can be seen.

    With Keras' own accumulation of gradients a step sees one batch's, and not what is added up.
    """
    return normalizes(type(optimizer)) and not getattr(optimizer, "gradient_accumulation_steps", None)


class GivenGradients:
    """Which gradients a step is given, of some of a layout's variables; it holds none of them, nor a variable."""

    def __init__(self, pairs: Pairs, tensors: Sequence[tf.Variable]) -> None:
        part_of = {id(tensor): part for part, tensor in enumerate(tensors)}
        self._is_sparse = {part_of[id(tensor_of(variable))]: isinstance(gradient, tf.IndexedSlices)
                           for gradient, variable in pairs if gradient is not None}

    def gather(self, inputs: Sequence[Values], offsets: Indices) -> Gather:
        """Reads elements of what came for the inputs, by the layout's offsets; zeros where there is no gradient."""
        remaining = iter(inputs)
        arrays = {part: self._next(is_sparse, remaining) for part, is_sparse in self._is_sparse.items()}

        def element(part: int, places: Indices) -> Values:
            if part not in arrays:
                return np.zeros(len(places))
            rows, values = arrays[part]
            if rows is None:
                return values.reshape(-1)[places]  # type: ignore[no-any-return]
            return elements_of_rows(rows, values, places)

        return lambda wanted: gather_by_parts(wanted, offsets, element)

    @staticmethod
    def inputs(pairs: Pairs) -> list[Any]:
        """The tensors that a Python function is to be given of these gradients."""
        return [tensor for gradient, _ in pairs if gradient is not None for tensor in (
            (gradient.indices, gradient.values) if isinstance(gradient, tf.IndexedSlices) else (gradient,))]

    @staticmethod
    def _next(is_sparse: bool, remaining: Iterator[Values]) -> tuple[Indices | None, Values]:
        return (next(remaining).astype(np.int64), next(remaining)) if is_sparse else (None, next(remaining))

"""Keras 3: copies of a distributed optimizer, and of models that have one, are distributed too.

Keras copies by way of what it writes into files, and there the optimizer is the plain one. So what
`DistributedOptimizer` was given travels beside it: with a pickle or a deep copy, and with `get_compile_config()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import horovod.tensorflow as hvd

import tensorflow as tf

from .optimizer import DistributedOptimizer, distributed_part


class _Arguments(dict[str, Any]):
    """Those of DistributedOptimizer; they refer to the process set, which a copy must not duplicate."""

    def __deepcopy__(self, _memo: Any) -> _Arguments:
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # every process has a global set of its own
        return _Arguments, ({name: value for name, value in self.items() if value is not hvd.global_process_set},)


class _Distribution(NamedTuple):
    """How an optimizer is distributed, or a model's."""

    is_inner: bool
    """Whether it is the optimizer that loss scaling has wrapped."""
    arguments: _Arguments

    @classmethod
    def of(cls, target: Any) -> _Distribution | None:
        """That of an optimizer, or of a model; None where it is plain."""
        optimizer = getattr(target, "optimizer", target)
        part = distributed_part(optimizer)
        return None if part is None else cls(part is not optimizer, _Arguments(part._arguments))

    def apply_to(self, copy: Any) -> None:
        """Distributes a plain copy alike."""
        optimizer = getattr(copy, "optimizer", copy)
        DistributedOptimizer(optimizer.inner_optimizer if self.is_inner else optimizer, **self.arguments)
        if copy is not optimizer:
            copy.jit_compile = False


class _CompileConfig(dict[str, Any]):
    """A model's compile config, which a file takes for a plain dictionary."""

    distribution: _Distribution


def install() -> None:
    """Wraps the methods by which Keras copies; once."""
    keras = tf.keras
    saveable = _owner(keras.optimizers.Optimizer, "__reduce__")
    if not hasattr(saveable.__reduce__, "_oktopk_installed"):
        saveable.__reduce__ = _wrap_reduce(saveable.__reduce__, saveable._unpickle_model)
        trainer = _owner(keras.Model, "get_compile_config")
        trainer.get_compile_config = _wrap_get_config(trainer.get_compile_config)
        trainer.compile_from_config = _wrap_from_config(trainer.compile_from_config)


def _owner(cls: Any, method: str) -> Any:
    return next(each for each in cls.__mro__ if method in vars(each))


Reduce = Callable[[Any], tuple[Any, ...]]


def _wrap_reduce(reduce: Reduce, read: Callable[..., Any]) -> Reduce:
    """What pickles and deep-copies Keras' objects: the bytes of a file, which hold the plain optimizer."""
    @functools.wraps(reduce)
    def wrapped(self: Any) -> tuple[Any, ...]:
        plain = reduce(self)
        distribution = _Distribution.of(self)
        return plain if distribution is None else (_copy, (read, plain[1], distribution))

    wrapped._oktopk_installed = True  # type: ignore[attr-defined]
    return wrapped


def _copy(read: Callable[..., Any], file: tuple[Any, ...], distribution: _Distribution) -> Any:
    copy = read(*file)
    distribution.apply_to(copy)
    return copy


def _wrap_get_config(get_config: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    @functools.wraps(get_config)
    def wrapped(self: Any) -> dict[str, Any]:
        config = get_config(self)
        distribution = _Distribution.of(self)
        if config and distribution is not None:
            config = _CompileConfig(config)
            config.distribution = distribution
        return config

    return wrapped


def _wrap_from_config(from_config: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
    @functools.wraps(from_config)
    def wrapped(self: Any, config: dict[str, Any]) -> None:
        from_config(self, config)
        if isinstance(config, _CompileConfig) and self.compiled:
            config.distribution.apply_to(self)

    return wrapped

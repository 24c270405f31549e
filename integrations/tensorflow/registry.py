"""The runs that serve an optimizer, a model, or the variables that tapes differentiate by.

An optimizer has Runs of its own. Tapes are made anew at every step, so theirs are found by what was asked for, and by
the variables.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_oktopk.schemes.options import Scheme
from horovod_oktopk.tensorflow.run import ALL, Run
from horovod_oktopk.tensorflow.runs import STATES, GradientRuns, Runs
from horovod_oktopk.tensorflow.variables import key_of, optimizers_of, trained_by

OF_TAPES: dict[Any, Runs[Any]] = {}


def runs_of_tapes(options: Scheme, op: Any, process_set: Any, sparse_as_dense: bool) -> Runs[Any]:
    """Return the runs of all tapes of which the same was asked, but for the density."""
    key = (type(options), tuple(options.settings_but_density().items()), op, process_set.process_set_id,
           sparse_as_dense)
    if key not in OF_TAPES:
        OF_TAPES[key] = GradientRuns(options, op, process_set, sparse_as_dense)
        OF_TAPES[key].states = STATES
    return OF_TAPES[key]


def _steps_of(target: Any) -> list[Any]:
    """Return the Steps of a distributed optimizer, which may be inside another one; or of all that a model has."""
    if isinstance(target, tf.keras.optimizers.Optimizer) and hasattr(target, "oktopk"):
        return [target.oktopk]
    inner = (optimizers_of(target) if isinstance(target, tf.keras.Model) else
             [getattr(target, name, None) for name in ("optimizer", "inner_optimizer")])
    return [steps for each in inner if each is not None for steps in _steps_of(each)]


def all_runs_of(target: Any) -> list[Runs[Any]]:
    """Return those of an optimizer; or of all optimizers that a model has."""
    return [steps.runs for steps in _steps_of(target) if steps.runs is not None]


def runs_beside(target: Any) -> list[Runs[Any]]:
    """Return those of the optimizers that train variables, or a model that has no optimizer: the last one of each."""
    if isinstance(target, tf.keras.Model) and optimizers_of(target):
        return []
    owners = (getattr(v, "_oktopk_runs", None) for v in trained_by(target))
    return list(dict.fromkeys(runs for owner in owners if owner is not None and (runs := owner()) is not None))


def tapes_beside(target: Any) -> list[Run]:
    """Return the runs of tapes that reduce variables of a target, which stands for the optimizers that it has."""
    reduced = {id(v) for v in trained_by(target) if getattr(v, "_oktopk_runs", target) is None}
    runs = [run for each in OF_TAPES.values() for key, run in each.present().items() if reduced & set(key)]
    return runs if all_runs_of(target) else []


def trains_densely(target: Any) -> bool:
    """Return True for an optimizer that reduces all elements, and for a model that has one."""
    return any(steps.runs is None for steps in _steps_of(target))


def runs_by_optimizer(target: Any) -> list[list[Run]]:
    """Return the runs of an optimizer or a model; or all over the variables of a model without one, or of a list."""
    several = all_runs_of(target)
    if several:
        return [list(each.present().values()) for each in several]
    wanted = set(key_of(trained_by(target)))
    either = [*OF_TAPES.values(), *runs_beside(target)]
    return [[run for each in either for key, run in each.present().items() if wanted & set(key)]]


def each_run_of(target: Any) -> list[Run]:
    """Return the runs of all optimizers of a target, together."""
    return [run for runs in runs_by_optimizer(target) for run in runs]


def in_use() -> bool:
    """Return True if any reduction of ours is in use."""
    return any(each.present() for each in list(ALL))

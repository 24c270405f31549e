"""Elastic jobs with `model.fit`: Horovod's decorator and callbacks, with a state that keeps residuals."""

from __future__ import annotations

from horovod.tensorflow.keras import elastic as stock
from horovod.tensorflow.keras.elastic import run

from horovod_oktopk.tensorflow.state import KerasState

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class CommitStateCallback(stock.CommitStateCallback):  # type: ignore[misc]
    """Commits the state after so many batches, and after every epoch: what a rank goes back to if another fails.

    It comes after the callbacks that update the state.

    Args:
        state: as of `KerasState`.
        batches_per_commit: the number of batches. A commit copies the model, and has `StepAhead` end its exchange.

    Examples:
        >>> hvd_keras.elastic.CommitStateCallback(state, batches_per_commit=100)
    """


class UpdateBatchStateCallback(stock.UpdateBatchStateCallback):  # type: ignore[misc]
    """Sets `state.batch` to the batch that has ended, and to 0 after an epoch.

    Args:
        state: with the value `batch`.

    Examples:
        >>> state = hvd_keras.elastic.KerasState(model, batch=0, epoch=0)
        >>> hvd_keras.elastic.UpdateBatchStateCallback(state)
    """


class UpdateEpochStateCallback(stock.UpdateEpochStateCallback):  # type: ignore[misc]
    """Sets `state.epoch` to the number of epochs that have ended, in all calls of fit together.

    Args:
        state: with the value `epoch`.

    Examples:
        >>> state = hvd_keras.elastic.KerasState(model, batch=0, epoch=0)
        >>> hvd_keras.elastic.UpdateEpochStateCallback(state)
    """

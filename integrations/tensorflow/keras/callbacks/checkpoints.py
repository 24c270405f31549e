"""Callbacks that write files: residuals after every epoch, and the best model."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk.errors import OptionError
from horovod_oktopk.tensorflow.keras.callbacks.broadcast import Logs
from horovod_oktopk.tensorflow.registry import each_run_of
from horovod_oktopk.tensorflow.state import load_state, meet, read_marks, save_state
from horovod_oktopk.tensorflow.variables import optimizers_of
from horovod_oktopk.transport.ranks import is_elastic

logger = logging.getLogger("horovod_oktopk")


class StateCheckpoint(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Saves residuals and counters after every epoch, and takes them back when training begins.

    It goes with ModelCheckpoint or BackupAndRestore, which save the model, and comes after them in the list.

    Args:
        filepath: the file, on rank 0's disk; `"{epoch}"` stands for the epoch, from 1, and `"{loss:.2f}"` for what
            rank 0's logs have, as in ModelCheckpoint.
        restore: the file to load when training begins, of this callback or of `save_state`; by default filepath,
            which with such names in it is none. It is taken if its step, if it tells that, is the model's.

    Raises:
        OptionError: On all ranks, at the end of an epoch: filepath has a name that the logs do not have.
        OSError: On all ranks, at the end of an epoch: the file cannot be written.

    Examples:
        >>> hvd_keras.callbacks.StateCheckpoint("residuals.npz")
    """

    def __init__(self, filepath: str | os.PathLike[str], restore: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._path = os.fspath(filepath)
        self._restore = os.fspath(restore) if restore is not None else self._path

    def on_train_begin(self, logs: Logs = None) -> None:
        # Rank 0 decides, as the others may not see its disk.
        found = hvd.broadcast_object(self._look() if hvd.rank() == 0 else None, root_rank=0,
                                     name="horovod_oktopk.checkpoint")
        if found is None:
            load_state(self.model, self._restore)
        elif found:
            kept = "stay as they are" if each_run_of(self.model) else "start at zero"
            logger.warning("residuals %s: %s", kept, found)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if not each_run_of(self.model):
            logger.warning("no residuals were saved: no optimizer that the model has as an attribute has reduced a "
                           "gradient with compression=OkTopk(...) yet, nor, if none is distributed, a tape over its "
                           "variables. Give that, save those of tapes by save_state([variables ...], path), or leave "
                           "StateCheckpoint out")
        else:
            meet(self.model, "save the state at the end of an epoch")
            path, wrong = hvd.broadcast_object(self._file_of(epoch, logs) if hvd.rank() == 0 else None,
                                               root_rank=0, name="horovod_oktopk.path")
            if wrong:
                raise OptionError(wrong)
            save_state(self.model, path, iterations=self._iterations())

    def _file_of(self, epoch: int, logs: Logs) -> tuple[str, str | None]:
        try:
            return self._path.format(**{**(logs or {}), "epoch": epoch + 1}), None
        except Exception as error:  # whatever it is, the other ranks wait for it
            return "", (f"the path {self._path!r} of StateCheckpoint cannot be filled in ({type(error).__name__}: "
                        f"{error}): use what this epoch has, {['epoch', *sorted(logs or {})]}")

    def _look(self) -> str | None:
        """Return None if the file is to be loaded; else the reason, or "" if it is no surprise."""
        try:
            if not Path(self._restore).exists():
                return ""
            saved = read_marks(self._restore).get("iterations", self._iterations())
        except (OSError, OptionError) as error:
            return f"{self._restore} cannot be read: {error}"
        if saved != self._iterations():
            if is_elastic():  # its state has put the model back to the last commit, and the residuals with it
                return ""
            return (f"{self._restore} is of step {saved}, the model of step {self._iterations()}: put "
                    "StateCheckpoint after the callback that loads the model")
        return None

    def _iterations(self) -> int:
        return sum(int(optimizer.iterations.numpy()) for optimizer in optimizers_of(self.model))


class BestModelCheckpoint(tf.keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the model whenever it is the best so far: Keras' ModelCheckpoint with save_best_only=True.

    Set `filepath` before fit, as Horovod's estimators do: this class has no such argument, and neither has Horovod's.
    Give it to one rank alone, after MetricAverageCallback.

    Args:
        monitor: the metric in the logs that tells which model is best.
        verbose: 1 to print what is saved.
        save_weights_only: True to save the weights without the model.
        mode: `"min"` or `"max"`: which value of the metric is best; `"auto"`: as its name tells.
        save_freq: `"epoch"`, or a number of batches. The latter goes inside `SharedParameters`.

    Raises:
        OptionError: When training begins: filepath is not set.

    Examples:
        >>> checkpoint = hvd_keras.callbacks.BestModelCheckpoint(monitor="loss")
        >>> checkpoint.filepath = "best.keras"
    """

    def __init__(self, monitor: str = "val_loss", verbose: int = 0, save_weights_only: bool = False,
                 mode: Literal["auto", "min", "max"] = "auto", save_freq: int | Literal["epoch"] = "epoch") -> None:
        unset = "unset.weights.h5" if save_weights_only else "unset.keras"  # Keras 3 takes no None
        super().__init__(unset, monitor=monitor, verbose=verbose, save_best_only=True,
                         save_weights_only=save_weights_only, mode=mode, save_freq=save_freq)
        self.filepath = None

    def on_train_begin(self, logs: Logs = None) -> None:
        if not self.filepath:
            raise OptionError("BestModelCheckpoint has no file: set its filepath before fit, "
                              'checkpoint.filepath = "best.keras"')
        self.filepath = os.fspath(self.filepath)
        super().on_train_begin(logs)

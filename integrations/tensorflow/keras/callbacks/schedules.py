"""Callbacks that change the learning rate, and the density, from epoch to epoch or from batch to batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk.errors import OptionError, PluginError
from horovod_oktopk.modes.api import set_density
from horovod_oktopk.schemes import warmup_density
from horovod_oktopk.schemes.warmup import WARM_UP
from horovod_oktopk.tensorflow.keras.callbacks.broadcast import Logs
from horovod_oktopk.tensorflow.private import sums_up_steps, velocities
from horovod_oktopk.tensorflow.registry import all_runs_of
from horovod_oktopk.tensorflow.variables import tensor_of

SCHEDULED = ("{name} sets the optimizer's learning rate, which is a schedule or a function: give the optimizer a "
             "number, or leave the callback out")
NO_STEPS = ("{name} needs the number of batches of an epoch, which Keras does not know of these data: give "
            "steps_per_epoch=... to the callback, or to fit")


class LearningRateScheduleCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """lr = initial_lr · multiplier(epoch) from one epoch to another; `logs["lr"]` has it after each epoch.

    Momentum correction (Goyal et al., 2017): the velocity v of SGD and RMSprop is a sum of steps, which have the
    learning rates of their time. If the learning rate changes from η to η′, v becomes v · η′/η before the step.
    Horovod's callback multiplies the momentum m by η′/η for one step instead, and m · η′/η · v is the same; but Keras
    compiles m into the step as a constant, which no callback can change. Nesterov's step has m twice: Horovod's
    changes both, and this callback the velocity alone.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch; or a number, a decay for each epoch: its power epoch − start_epoch is
            taken.
        start_epoch: the first epoch in which the learning rate is set.
        end_epoch: the first epoch in which it no longer is; None: it always is.
        staircase: True: set it at the first batch of an epoch. False: at every batch, with epoch + batch /
            steps_per_epoch for the epoch.
        momentum_correction: correct the velocity of an optimizer that has one.
        steps_per_epoch: the number of batches; None: what Keras knows.

    Raises:
        OptionError: initial_lr is None; or, when training begins, Keras does not know the number of batches.
        PluginError: When training begins: the learning rate is a schedule; or momentum is to be corrected with
            `Partial`.

    Examples:
        >>> hvd_keras.callbacks.LearningRateScheduleCallback(
        ...     initial_lr=0.1 * hvd.size(), multiplier=lambda epoch: 0.1, start_epoch=30, end_epoch=60)
    """

    def __init__(self, initial_lr: float, multiplier: float | Callable[[float], float], start_epoch: int = 0,
                 end_epoch: int | None = None, staircase: bool = True, momentum_correction: bool = True,
                 steps_per_epoch: int | None = None) -> None:
        super().__init__()
        if initial_lr is None:
            raise OptionError("initial_lr must be a number, the learning rate that is multiplied; got None")
        self.initial_lr, self.steps_per_epoch = initial_lr, steps_per_epoch
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self._multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self._is_staircase, self._corrects_momentum = staircase, momentum_correction
        self._epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Raise an error, on all ranks, for what cannot be done."""
        try:
            self.model.optimizer.learning_rate = self._rate()
        except (TypeError, AttributeError) as error:  # of a schedule, in both Kerases; of a function, in Keras 3
            raise PluginError(SCHEDULED.format(name=type(self).__name__)) from error
        if self._corrects_momentum and sums_up_steps(self.model.optimizer):
            for runs in all_runs_of(self.model):
                runs.kind.check("momentum_correction", name=type(self).__name__)
        if not self._is_staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise OptionError(NO_STEPS.format(name=type(self).__name__))

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self._is_staircase:
            self._set(self._multiplier(self._epoch + batch / self._steps()))
        elif batch == 0:
            self._set(self._multiplier(self._epoch))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def _steps(self) -> int:
        assert self.steps_per_epoch, "asked for before training has begun"
        return self.steps_per_epoch

    def _rate(self) -> float:
        """Return the user's learning rate; outside of a step it has no factor of StepAhead's."""
        rate: float = float(tensor_of(self.model.optimizer.learning_rate))
        return rate

    def _set(self, multiplier: float) -> None:
        before, now = self._rate(), self.initial_lr * multiplier
        self.model.optimizer.learning_rate = now
        if self._corrects_momentum and before and now != before:
            for velocity in map(tensor_of, velocities(self.model.optimizer)):
                velocity.assign(velocity * tf.cast(now / before, velocity.dtype))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """lr = initial_lr / P at first, and more at every batch, until it is initial_lr after the first epochs.

    P is the number of ranks, steps the number of batches of an epoch, and epoch + (batch + 1) / steps the time:
    lr = initial_lr / P · (time · (P − 1) / warmup_epochs + 1) (Goyal et al., 2017). On one rank it is initial_lr.
    The velocity is corrected as in `LearningRateScheduleCallback`.

    Args:
        initial_lr: the learning rate after the warm-up, of the whole job.
        warmup_epochs: the number of epochs.
        momentum_correction: correct the velocity of an optimizer that has one.
        steps_per_epoch: the number of batches; None: what Keras knows.
        verbose: 1 to have rank 0 print the learning rate after the warm-up.

    Raises:
        OptionError: initial_lr is None; or, when training begins, Keras does not know the number of batches.
        PluginError: When training begins: the learning rate is a schedule; or momentum is to be corrected with
            `Partial`.

    Examples:
        >>> hvd_keras.callbacks.LearningRateWarmupCallback(
        ...     initial_lr=0.1 * hvd.size(), warmup_epochs=3, verbose=1)
    """

    def __init__(self, initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool = True,
                 steps_per_epoch: int | None = None, verbose: int = 0) -> None:
        def multiplier(epoch: float) -> float:
            size: int = hvd.size()
            return ((epoch + 1 / self._steps()) * (size - 1) / warmup_epochs + 1) / size

        super().__init__(initial_lr, multiplier, end_epoch=warmup_epochs, staircase=False,
                         momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch)
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self.end_epoch == epoch + 1:  # with steps_per_execution the last batch has not been seen
            self._set(1.0)
        super().on_epoch_end(epoch, logs)
        if self.end_epoch == epoch + 1 and self._verbose and hvd.rank() == 0:
            # Printed like the progress of fit, which was asked for, too.
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")  # noqa: T201


class DensityWarmup(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Select more in the first epochs, as gTop-k has it (Shi et al., ICDCS 2019); then as the options say.

    An epoch's density is never less than that of the options.

    Args:
        densities: those of the first epochs, each about a quarter of the one before: 25 %, 7.25 %, 1.5 % and 0.4 %,
            the paper's.

    Raises:
        OptionError: When an epoch begins: its density is not in (0, 1].
        PluginError: When an epoch begins: the model's optimizer was not made with `compression=OkTopk(...)`.

    Examples:
        >>> hvd_keras.callbacks.DensityWarmup([0.25, 0.1, 0.03])
    """

    def __init__(self, densities: Sequence[float] = WARM_UP) -> None:
        super().__init__()
        self._densities = densities

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        set_density(self.model, None)  # that of the options, to compare with
        least = max((runs.scheme.present_density for runs in all_runs_of(self.model)), default=0.0)
        density = warmup_density(epoch, self._densities)
        if density is not None and not density <= least:
            set_density(self.model, density)

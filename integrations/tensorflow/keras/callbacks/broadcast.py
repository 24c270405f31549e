"""The callback that makes ranks start alike, and Keras see what they share; and one that does so in mid-epoch."""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partialmethod
from itertools import chain, zip_longest
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_oktopk.errors import AgreementError, OptionError, PluginError
from horovod_oktopk.modes.api import shared_parameters, synchronize_replicas
from horovod_oktopk.tensorflow.optimizer import is_distributed, refuse_stock, steps_unseen
from horovod_oktopk.tensorflow.private import all_layers
from horovod_oktopk.tensorflow.registry import all_runs_of, each_run_of
from horovod_oktopk.tensorflow.run import Run
from horovod_oktopk.tensorflow.runs import PartialRuns
from horovod_oktopk.tensorflow.state import broadcast_by_position, check_alike, leave_blocks, meet, resume, suspend
from horovod_oktopk.tensorflow.variables import is_variable, optimizers_of, tensor_of, trained_by, variables_in

logger = logging.getLogger("horovod_oktopk")
Logs = dict[str, Any] | None
PUT_BACK = ("the ranks have different parameters at the end of fit: a callback has put back what it took while the "
            "model held each rank's own, as EarlyStopping(restore_best_weights=True) does if it comes before "
            "BroadcastGlobalVariablesCallback. Put that one first in the list")
AVERAGES = ("with StepAhead the ranks have different values of %d variables that are not trained (%s): an average of "
            "the weights, of a teacher or a target network, is one of each rank's own in a training step. Compute it "
            "inside shared_parameters(model), in on_epoch_end of a callback after BroadcastGlobalVariablesCallback, "
            "say; or use OkTopk alone. Statistics of batches are each rank's own: give them as local_variables")
PLAIN = ("the model's optimizer is not distributed: its gradients stay each rank's own. Give model.compile what "
         "hvd_keras.DistributedOptimizer(optimizer, compression=...) returns")

COMPILED_BEFORE = ("the optimizer was distributed after Keras had compiled the model's training step, which goes on "
                   "with the plain one, on each rank for itself: call model.compile(...) after DistributedOptimizer")


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """All ranks start from the root's weights and optimizer state; random seeds stay their own. First in the list.

    The model is the same on all ranks whenever Keras looks at it: in validation and prediction, for the callbacks at
    the end of an epoch, and after `fit`. With `StepAhead` it holds each rank's own parameters in between, and with
    `Partial` replicas may differ by some rounds.

    Weights are taken of the model, and of all optimizers that it has, a GAN's own ones too. Variables that are made
    by the first batch are taken after it, and those that come later, with a warning, at the end of their epoch. XLA,
    which cannot compile a collective, is switched off for the model.

    Args:
        root_rank: the rank whose values all take.
        device: is of no effect; Horovod's callback has this argument.
        local_variables: a variable, or several, that stay each rank's own. The optimizer's state is broadcast.

    Raises:
        AgreementError: On all ranks, if they have different variables; or, at the end of an epoch, different numbers
            of batches.
        OptionError: A local variable is no variable.
        PluginError: At the first batch: the optimizer was distributed after the model had been trained, and the model
            was not compiled again. When training begins: a local variable is trained with `StepAhead` or `Partial`,
            which keep the parameters of all ranks alike; or Horovod's own optimizer is used under Keras 3, which
            reduces nothing.

    Examples:
        >>> hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._local: set[Any] = set()
        given = () if local_variables is None else local_variables
        for variable in [given] if is_variable(given) else given:
            self.register_local_var(variable)
        self._between, self._looking = ExitStack(), ExitStack()  # epochs; validation and prediction
        self._fits = False

    def register_local_var(self, var: Any) -> None:
        """Leave a variable of the model each rank's own."""
        if not is_variable(var):
            raise OptionError(f"local_variables takes variables of the model or of its layers; got {var!r}")
        self._local.add(tensor_of(var).ref())

    def set_model(self, model: Any) -> None:
        """Take the model, before its training step is made."""
        super().set_model(model)
        model.jit_compile = False

    def on_train_begin(self, logs: Logs = None) -> None:
        self._sent: set[Any] = set()
        self._is_first_batch = self._fits = True
        self._leave()
        refuse_stock(optimizers_of(self.model))
        suspend(self.model)
        leave_blocks(self.model)
        trains_local = not self._local.isdisjoint(v.ref() for v in trained_by(self.model))
        spectral = [each.name for each in all_layers(self.model)
                    if isinstance(each, tf.keras.layers.SpectralNormalization)]
        for runs in all_runs_of(self.model):
            if trains_local:
                runs.kind.check("local")
            if spectral:
                runs.kind.check("spectral", name=spectral[0])
            runs.adopts = True
            for run in runs.present().values():  # as the runs of workers that join an elastic job will
                run.mode.adopts |= not run.mode.reduction.is_current
        optimizer, variables = self.model.optimizer, trained_by(self.model)
        # A model may say that it is built, though its layers have no variables yet.
        if self.model.built and variables and is_distributed(optimizer) and not getattr(optimizer, "built", False):
            optimizer.build(self.model.trainable_variables)
        self._broadcast(must_agree=False)  # what only some ranks have restored waits for the others' first batch

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._leave()
        resume(self.model)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Go on, if an epoch has more batches than Keras says: Horovod's elastic callbacks lower that number."""
        self._between.close()
        if self._is_first_batch:
            self._unseen = steps_unseen(optimizers_of(self.model))

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Give the model the shared parameters after an epoch's last batch, for callbacks before this one as well."""
        if self._is_first_batch:
            self._is_first_batch = False
            has_passed = steps_unseen(optimizers_of(self.model)) > self._unseen
            if any(hvd.allgather_object(has_passed, name="horovod_oktopk.passed")):
                raise PluginError(COMPILED_BEFORE)
            self._broadcast()
            if not each_run_of(self.model) and not any(map(is_distributed, optimizers_of(self.model))):
                logger.warning(PLAIN)
        if batch + 1 == (self.params or {}).get("steps"):
            self._between.enter_context(shared_parameters(self.model))

    def on_test_begin(self, logs: Logs = None) -> None:
        if self._fits:
            self._synchronize("validation")
        self.on_predict_begin()

    def on_predict_begin(self, logs: Logs = None) -> None:
        self._looking.enter_context(shared_parameters(self.model))

    def on_test_end(self, logs: Logs = None) -> None:
        self._looking.close()

    on_predict_end = on_test_end

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._synchronize("the end of an epoch")
        meet(self.model, "broadcast variables at the end of an epoch")
        late = [variable.name for variable in self._broadcast()]
        if late:
            logger.warning("%d variables were made after the first batch (%s): the ranks had their own until the end "
                           "of epoch %d, and have those of rank %d now. Build the model before fit", len(late),
                           ", ".join(late[:4]), epoch + 1, self._root_rank)
        self._between.enter_context(shared_parameters(self.model))

    def on_train_end(self, logs: Logs = None) -> None:
        self._synchronize("the end of fit")
        self._fits = False
        self._leave()
        suspend(self.model)
        self._compare()

    def _compare(self) -> None:
        """Raise AgreementError, on all ranks, if a callback has put a rank's own parameters back into the model.

        Warn if other variables, but for statistics of batches, have become each rank's own.
        """
        meet(self.model, "end fit")
        runs = [run for run in each_run_of(self.model) if run.mode.reads_memory]
        variables = [v for run in runs if _is_of_all_ranks(run) for v in run.tensors]
        if not variables:
            return
        known = {v.ref() for run in runs for v in run.tensors} | self._local | {
            tensor_of(v).ref() for each in all_layers(self.model) for v in each.weights
            if isinstance(each, tf.keras.layers.BatchNormalization)}
        others = [v for v in map(tensor_of, variables_in(self.model, "weights"))
                  if v.ref() not in known and v.dtype.is_floating]
        digests = hvd.allgather_object([_digest(variables), *(_digest([v]) for v in others)],
                                       name="horovod_oktopk.end")
        alike = [len(set(each)) == 1 for each in zip(*digests, strict=False)]
        if not alike[0]:
            raise AgreementError(PUT_BACK)
        differing = [v.name for v, same in zip(others, alike[1:], strict=False) if not same]
        if differing:
            logger.warning(AVERAGES, len(differing), ", ".join(differing[:4]))

    def _leave(self) -> None:
        self._looking.close()
        self._between.close()

    def _synchronize(self, doing: str) -> None:
        """Make replicas equal, with Partial; then all ranks must have come for the same."""
        if any(isinstance(runs, PartialRuns) for runs in all_runs_of(self.model)):
            synchronize_replicas(self.model)
            check_alike("places in fit", [doing])

    def _broadcast(self, must_agree: bool = True) -> list[Any]:
        """Broadcast what has not been yet, owner by owner, and return it; all ranks send the same."""
        holding = [run for run in each_run_of(self.model) if run.mode.holds_own]
        # These have begun with what ranks share, and do not need to be sent when they hold that again.
        self._sent.update(v.ref() for run in holding if _is_of_all_ranks(run) for v in run.tensors)
        fresh = self._not_sent({v.ref() for run in holding for v in run.tensors})
        # Without the names, which may hold a counter of all layers that a rank has made.
        mine = [[f"{v.dtype.name} of shape {tuple(v.shape)}" for v in each] for each in fresh]
        theirs = hvd.allgather_object(mine, name="horovod_oktopk.broadcast")
        alike = [all(each == of_owner[0] for each in of_owner) for of_owner in zip_longest(*theirs)]
        if must_agree and not all(alike):
            raise AgreementError(_difference(theirs))
        variables = [v for each, agreed in zip(fresh, alike, strict=False) if agreed for v in each]
        if variables:
            synchronize_replicas(self.model)  # with Partial, some may have seen more rounds than others
            broadcast_by_position(variables, self._root_rank)
            self._sent.update(v.ref() for v in variables)
        return variables

    def _not_sent(self, own: set[Any]) -> list[list[Any]]:
        """Return what has not been broadcast, and is no rank's own: of the model, and of each optimizer."""
        owners = [variables_in(self.model, "weights"), *map(variables_in, optimizers_of(self.model))]
        known = self._sent | self._local | own
        fresh: list[list[Any]] = []
        for variables in owners:
            fresh.append([v for v in map(tensor_of, variables) if v.ref() not in known])
            known.update(v.ref() for v in fresh[-1])
        return fresh


def _digest(variables: Iterable[Any]) -> int:
    return functools.reduce(lambda crc, v: zlib.crc32(v.numpy().tobytes(), crc), variables, 0)


def _is_of_all_ranks(run: Run) -> bool:
    return bool(run.mode.reduction.ranks.membership().size == hvd.size())


def _difference(theirs: list[list[list[str]]]) -> str:
    every = zip_longest(*(chain.from_iterable(owners) for owners in theirs), fillvalue="none")
    number, differing = next(((i, each) for i, each in enumerate(every) if len(set(each)) > 1), (0, ()))
    found = "; ".join(f"rank {rank}: {variable}" for rank, variable in enumerate(differing))
    return ("the variables of the model and its optimizers differ between the ranks, and cannot be broadcast (of "
            f"those that have not been, number {number} is {found}). Make the same layers and optimizers on all "
            "ranks")


class SharedParameters(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Have another callback see the parameters that all ranks share, in the middle of an epoch as well.

    With `StepAhead` the model holds a rank's own there. What is under way is applied first, whenever the callback is
    called. It comes after BroadcastGlobalVariablesCallback.

    Args:
        callback: is called inside `with shared_parameters(model):`.

    Examples:
        >>> hvd_keras.callbacks.SharedParameters(
        ...     keras.callbacks.ModelCheckpoint("model.keras", save_freq=100))
    """

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self._callback = callback

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self._callback.set_params(params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._callback.set_model(model)

    def _inside(self, name: str, *args: Any, **kwargs: Any) -> None:
        with shared_parameters(self.model):
            getattr(self._callback, name)(*args, **kwargs)


for _name in dir(tf.keras.callbacks.Callback):
    if _name.startswith("on_"):
        setattr(SharedParameters, _name, partialmethod(SharedParameters._inside, _name))

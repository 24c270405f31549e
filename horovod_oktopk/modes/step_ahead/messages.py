"""The messages of step-ahead error feedback."""

from __future__ import annotations

from collections.abc import Mapping

BROADCAST_FIRST = ("the parameters, which must be the same everywhere before the first step "
                   "(broadcast_parameters; in Keras a model that is built, and the callback "
                   "BroadcastGlobalVariablesCallback of horovod_oktopk.tensorflow.keras, as Horovod's own sends them "
                   "after the first batch), and whenever shared_parameters ends")
NARROW = ("StepAhead needs float32 or float64 parameters; '{name}' has {dtype}. What a rank has not sent yet would "
          "be lost to rounding: keep float32 parameters, and compute in 16 bits (torch.autocast; in Keras the policy "
          "mixed_float16 or mixed_bfloat16)")
SEVERAL = ("StepAhead needs parameters of one dtype; '{name}' has {dtype}, and '{first[0]}' has {first[2]}: convert "
           "the model, or make two optimizers")
OTHER_PARAMETERS = ("the model holds other parameters than those that all ranks shared when this state was saved, or "
                    "under names in another order, so what this rank had not sent then is dropped: save and load "
                    "both inside shared_parameters(optimizer)")
CHANGED = ("the model's weights were changed after training had stopped, as load_weights and "
           "EarlyStopping(restore_best_weights=True) do, so what this rank had not sent is dropped: to keep that of "
           "another moment, load the state which was saved with its weights")
INSIDE = ("a step inside shared_parameters: the model holds what all ranks share there, to be evaluated and saved; "
          "leave it before the next step")
ADOPTED = "rank %d has taken rank 0's parameters at its first step, in place of a step of its own"
SKIPPED = ("the gradients of rank %d are not finite, so it takes no step of its own: look at its data if this "
           "happens often")
SCALED = "the gradients of rank %d are not finite at its loss scale, which goes down: it takes no step of its own"
NOT_FINITE = ("the parameters of ranks {ranks} are not finite after their own step, though their gradients were. "
              "Training has diverged: try a lower learning rate. The shared parameters are intact: "
              "shared_parameters(optimizer)")
OVERFLOW = ("the ranks' moves are finite, and their sum is not: training has diverged. Try a lower learning rate. "
            "The shared parameters are intact: shared_parameters(optimizer)")
NEVER_SHARED = ("shared_parameters was never entered: wherever the model was evaluated or saved, it held this rank's "
                "own parameters, and not those that all ranks share. Write: with shared_parameters(optimizer): ...")
REFUSED: Mapping[str, str] = {
    "local": "a local variable cannot be used with StepAhead, which shares all of the optimizer's: give local "
             "layers an optimizer of their own",
    "averaging": "{name} cannot be used with StepAhead: its eval() and train() move the parameters by a state "
                 "that is each rank's own: use OkTopk alone, with which all ranks have the same state",
    "sharded": "{name} cannot be used with StepAhead: each rank steps a part of the parameters, by its own "
               "gradients alone, and sends it itself: use OkTopk alone, or distribute an optimizer that is whole "
               "on each rank",
    "dual": "{name} cannot be used with StepAhead: it sets the parameters from sums of its own gradients, and so "
            "undoes what other ranks have sent: use OkTopk alone, with which all ranks have the same sums",
    "constraint": "'{name}' has a constraint, which StepAhead would keep in each rank's own parameters, and not "
                  "in those that all ranks share: use OkTopk alone, with which all ranks have the same ones",
    "spectral": "the layer '{name}' normalizes its kernel in each step of training, beside the optimizer, which "
                "StepAhead would exchange as if it were a step: use OkTopk alone",
    "use_ema": "use_ema=True averages the variables of each rank, which differ with StepAhead: average what all "
               "ranks share, inside shared_parameters(model), or use OkTopk",
    "several": "MultiOptimizer has no learning rate to be multiplied by StepAhead's coefficient and gain, as "
               "each optimizer in it has its own: use OkTopk"}
"""Features that a program must not use with StepAhead, and the advice; see `Mode.refused`."""

"""Ok-Topk inside horovod.tensorflow.

Importing this module makes `compression=OkTopk(...)` work in its tapes and optimizers, and in those of
horovod.tensorflow.keras, with either Keras.
"""

from horovod_oktopk.modes.api import catch_up, set_density, shared_parameters, step_report, synchronize_replicas
from horovod_oktopk.modes.options import StepAhead
from horovod_oktopk.schemes import Dense, GaussianK, GTopk, OkTopk, SameBlocks, TopkA, TopkDSA, warmup_density
from horovod_oktopk.transport.horovod import what_is_missing

try:
    from horovod_oktopk.tensorflow import plugin
except ModuleNotFoundError as error:
    raise what_is_missing(error, __name__, "TensorFlow", "HOROVOD_WITH_TENSORFLOW") from error

from horovod_oktopk.tensorflow.state import load_state, save_state

plugin.install()

__all__ = ["Dense", "GTopk", "GaussianK", "OkTopk", "SameBlocks", "StepAhead", "TopkA", "TopkDSA", "catch_up",
           "load_state", "save_state", "set_density", "shared_parameters", "step_report", "synchronize_replicas",
           "warmup_density"]

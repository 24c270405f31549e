"""Distributed training with Keras' `model.fit`: one script for Keras 3 and for tf-keras."""

from horovod_oktopk.modes.options import Partial, StepAhead
from horovod_oktopk.schemes import Dense, GaussianK, GTopk, OkTopk, SameBlocks, TopkA, TopkDSA, warmup_density
from horovod_oktopk.tensorflow import (
    catch_up,
    load_state,
    save_state,
    set_density,
    shared_parameters,
    step_report,
    synchronize_replicas,
)
from horovod_oktopk.tensorflow.keras import callbacks, elastic
from horovod_oktopk.tensorflow.plugin import DistributedOptimizer, load_model
from horovod_oktopk.tensorflow.state import KerasState

__all__ = ["Dense", "DistributedOptimizer", "GTopk", "GaussianK", "KerasState", "OkTopk", "Partial", "SameBlocks",
           "StepAhead", "TopkA", "TopkDSA", "callbacks", "catch_up", "elastic", "load_model", "load_state",
           "save_state", "set_density", "shared_parameters", "step_report", "synchronize_replicas", "warmup_density"]

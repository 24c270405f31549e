"""Callbacks for `model.fit`: Horovod's, for either Keras, and those that OkTopk adds."""

from horovod_oktopk.tensorflow.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback, SharedParameters
from horovod_oktopk.tensorflow.keras.callbacks.checkpoints import BestModelCheckpoint, StateCheckpoint
from horovod_oktopk.tensorflow.keras.callbacks.reports import MetricAverageCallback, StepReportLogger
from horovod_oktopk.tensorflow.keras.callbacks.schedules import (
    DensityWarmup,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)

__all__ = ["BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "DensityWarmup", "LearningRateScheduleCallback",
           "LearningRateWarmupCallback", "MetricAverageCallback", "SharedParameters", "StateCheckpoint",
           "StepReportLogger"]

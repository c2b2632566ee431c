"""Callbacks for both Keras: under Horovod's names, and the one that keeps residuals."""

from dgc.tensorflow.keras.callbacks.horovod import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from dgc.tensorflow.keras.checkpoint import CompressionCheckpoint

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "CompressionCheckpoint",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

"""Callbacks for both Keras: under Horovod's names, the one that keeps residuals, and the one that shows them."""

from dgc.tensorflow.keras.callbacks.horovod import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from dgc.tensorflow.keras.callbacks.log import LogCompression
from dgc.tensorflow.keras.checkpoint import CompressionCheckpoint

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "CompressionCheckpoint",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LogCompression",
    "MetricAverageCallback",
]

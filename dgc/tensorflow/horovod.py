"""Horovod for TensorFlow, or an error that says how to get it; and small questions to all ranks."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from dgc.errors import ConfigError, TransportError

INSTALL_HINT = "Build Horovod for the installed TensorFlow with: python -m dgc build-horovod --install"


def import_horovod(initialized: bool = True) -> ModuleType:
    """Import ``horovod.tensorflow``.

    Args:
        initialized: also require that ``hvd.init()`` has been called.

    Raises:
        ConfigError: Horovod is missing, was built without or for another TensorFlow, or is not initialised.
    """
    try:
        import horovod.tensorflow as hvd
    except (ImportError, tf.errors.NotFoundError) as error:
        raise ConfigError(
            f"dgc.tensorflow needs Horovod, and importing horovod.tensorflow failed: {error}. {INSTALL_HINT}"
        ) from error
    if not hasattr(hvd, "allreduce"):
        raise ConfigError(f"Horovod is installed, but was built without TensorFlow. {INSTALL_HINT}")
    if initialized and not hvd.is_initialized():
        raise ConfigError("Horovod is not initialised: call hvd.init() before anything of dgc.tensorflow")
    return hvd


def is_alone(process_set: Any = None) -> bool | None:
    """Whether this process has nobody to exchange with (one rank, or outside the set); None before ``hvd.init()``."""
    hvd = import_horovod(initialized=False)
    if not hvd.is_initialized():
        return None
    chosen = hvd.global_process_set if process_set is None else process_set
    return not chosen.included() or chosen.size() == 1


def member_set(process_set: Any = None) -> Any:
    """The Horovod process set to use, with this process in it.

    Args:
        process_set: a ``hvd.ProcessSet``, or None for all ranks.

    Raises:
        ConfigError: Horovod is not ready, does not know the set, or this process is not in it.
    """
    hvd = import_horovod()
    chosen = hvd.global_process_set if process_set is None else process_set
    if getattr(chosen, "process_set_id", None) is None:
        raise ConfigError(
            f"Horovod does not know {chosen}: give it to hvd.init(process_sets=[...]) or hvd.add_process_set(...)"
        )
    if chosen.process_set_id != 0 and chosen.included() is False:
        raise ConfigError(f"rank {hvd.rank()} is not in {chosen}: only its members exchange gradients through it")
    return chosen


def gather_values(value: Any, question: str, process_set: Any) -> list[Any]:
    """Ask all ranks of ``process_set`` for a small value. Collective, on Horovod's own channel.

    Args:
        value: what this rank answers; JSON must know it.
        question: names the collective.
        process_set: as returned by :func:`member_set`.

    Returns:
        Every rank's value in rank order.

    Raises:
        TransportError: Horovod's collective failed.
    """
    # One line per rank: Horovod joins arrays of different lengths, and JSON has no line ends of its own.
    line = np.frombuffer((json.dumps(value) + "\n").encode(), np.uint8)
    name = f"dgc.{process_set.process_set_id}.{question}"
    lines = gather_bytes(line, name, process_set).tobytes().decode()
    return [json.loads(text) for text in lines.splitlines()]


def gather_bytes(message: np.ndarray, name: str, process_set: Any) -> np.ndarray:
    """Join the members' messages in rank order, also while a TensorFlow function is being traced.

    Raises:
        TransportError: Horovod's collective failed.
    """
    hvd = import_horovod()
    # CPU tensors: a NCCL build must not take bytes that live in host memory to a GPU. init_scope leaves a trace.
    with tf.init_scope(), tf.device("/cpu:0"):
        try:
            out = hvd.allgather(tf.constant(message), name=name, process_set=process_set, ignore_name_scope=True)
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            raise TransportError(f"Horovod could not gather {message.size} bytes ({name}): {error}") from error
        return np.asarray(out)

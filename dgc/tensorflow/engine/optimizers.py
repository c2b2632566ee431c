"""Options, slots and updates of the optimizers of Keras 3 and legacy Keras."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from dgc.tensorflow.engine.tensors import Variable, raw_variable

Optimizer: TypeAlias = "tf.keras.optimizers.Optimizer"

KERAS3, LEGACY, LEGACY_V2 = "keras", "tf_keras", "tf_keras.legacy"


class Taken(float):
    """The momentum of an SGD whose own one the compressor applies: 0, and no number that a user would assign."""


_UPDATES = (
    "apply_gradients",
    "apply",
    "update_step",
    "_backend_apply_gradients",
    "_backend_update_step",
    "_internal_apply_gradients",
    "_clip_gradients",
    "_transform_gradients",
    "_transform_unaggregated_gradients",
    "_resource_apply_dense",
)
"""Methods that gradients pass through on their way into the variables, of either Keras."""
_KNOWN_UPDATES = ("keras", "tf_keras", "tensorflow", "horovod", "dgc")
"""Packages whose updates by SGD, and by what wraps it, are known to do nothing else with gradients."""

_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


def family(optimizer: object) -> str | None:
    """Which library an optimizer belongs to, without importing any of them; None if it is no optimizer."""
    for cls in type(optimizer).__mro__:
        module, name = cls.__module__, cls.__name__
        if module.startswith("keras.src.optimizers") and name in ("Optimizer", "BaseOptimizer"):
            return KERAS3
        if module.startswith("tf_keras.src.optimizers") and name == "OptimizerV2":
            return LEGACY_V2
        if module.startswith("tf_keras.src.optimizers") and name in ("Optimizer", "_BaseOptimizer"):
            return LEGACY
        if module.startswith("tf_keras.src.mixed_precision") and name == "BaseLossScaleOptimizer":
            return LEGACY
    return None


def learning_rate(optimizer: Optimizer) -> Any:
    """The learning rate that ``optimizer`` will apply in the step under way: a number or a tensor."""
    kind = family(optimizer)
    if kind == LEGACY_V2:
        return optimizer._decayed_lr(tf.float32)
    if kind == LEGACY:
        # Its `learning_rate` is the one of the step before when it follows a schedule.
        rate = optimizer._learning_rate
        return rate(optimizer.iterations) if callable(rate) and not isinstance(rate, tf.Variable) else rate
    return optimizer.learning_rate


def without_loss_scale(optimizer: Optimizer) -> Any:
    """The optimizer inside Keras' LossScaleOptimizer, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def optimizer_variables(optimizer: Optimizer | None) -> list[Any]:
    """All variables of an optimizer, the learning rate among them, which legacy Keras does not list."""
    listed = getattr(optimizer, "variables", [])
    listed = list(listed() if callable(listed) and not isinstance(listed, list) else listed)
    rate = getattr(without_loss_scale(optimizer), "learning_rate", None)
    return [*listed, rate] if isinstance(raw_variable(rate), tf.Variable) else listed


def clipping(optimizer: Optimizer) -> str | None:
    """The option by which a Keras optimizer clips what it is given, as the user wrote it; None if it does not."""
    for name in _CLIPPING:
        value = getattr(optimizer, name, None)
        # Keras takes a threshold of 0 for none, and any type that it can compare.
        if value is not None and _is_positive(value):
            return f"{name}={value}"
    return None


def _is_positive(value: Any) -> bool:
    try:
        with tf.init_scope():
            return float(value) > 0
    except (TypeError, ValueError):
        return True


def is_sgd(optimizer: Optimizer) -> bool:
    """Whether the optimizer's momentum is one that the compressor can apply."""
    return is_keras(optimizer, "SGD")


def is_keras(optimizer: Optimizer, name: str) -> bool:
    """Whether the optimizer is of this class of either Keras, or of one derived from it."""
    return any(
        c.__module__.partition(".")[0] in ("keras", "tf_keras") and c.__name__ == name for c in type(optimizer).__mro__
    )


def own_update(optimizer: Optimizer) -> str | None:
    """Name the user's code that may change gradients before they update variables; None: there is none.

    A method of a subclass or of this one optimizer, or ``gradient_transformers``.
    """
    if getattr(optimizer, "gradient_transformers", None):
        return "gradient_transformers"
    for owner in (optimizer, *type(optimizer).__mro__):
        for name in _UPDATES:
            method = getattr(owner, "__dict__", {}).get(name)
            method = getattr(method, "func", method)  # of a functools.partial
            if method is not None and str(getattr(method, "__module__", None)).partition(".")[0] not in _KNOWN_UPDATES:
                cls = owner if isinstance(owner, type) else type(optimizer)
                return f"{cls.__name__}.{name}()"
    return None


def first_moment(optimizer: Optimizer) -> Any:
    """Adam's beta1, and that of its relatives; None where there is none, or none that is known without a graph."""
    # Legacy Keras would make variables of its hyperparameters when one of them is read.
    return optimizer._hyper.get("beta_1") if family(optimizer) == LEGACY_V2 else getattr(optimizer, "beta_1", None)


def get_momentum(optimizer: Optimizer) -> tuple[float, bool]:
    """Momentum and Nesterov that an SGD holds.

    Legacy Keras' older optimizers keep their momentum when it is cleared; the others have 0 then, as :class:`Taken`.
    """
    with tf.init_scope():
        momentum = float(optimizer.momentum)
    if family(optimizer) == LEGACY_V2:
        # Its number becomes a float32 variable sooner or later.
        momentum = float(np.float32(momentum))
    return momentum, bool(optimizer.nesterov)


def is_cleared(optimizer: Optimizer) -> bool:
    """Whether :func:`clear_momentum` was called for this SGD, and no momentum was assigned since."""
    if family(optimizer) == LEGACY_V2:
        return bool(get_momentum(optimizer)[0]) and not optimizer._momentum
    return isinstance(optimizer.momentum, Taken)


def clear_momentum(optimizer: Optimizer) -> None:
    """Make an SGD apply no momentum; its ``nesterov``, which has no effect then, stays.

    It no longer writes into its momentum slots either: at a momentum of 0 some go on keeping their last update there,
    which would be loaded with the model as a dense run's momentum.
    """
    kind = family(optimizer)
    if kind == LEGACY_V2:
        # A flag decides whether it applies momentum; checkpoints hold the number.
        optimizer._momentum = False
    else:
        optimizer.momentum = Taken()
        if kind == LEGACY:
            # An instance's method: a class of its own would be saved with the model, and loaded without us.
            optimizer.update_step = functools.partial(_update_without_slots, optimizer)


def _update_without_slots(optimizer: Optimizer, gradient: object, variable: Variable) -> None:
    """A ``tf_keras`` SGD's own update where it finds no slots, which it can do without."""
    attributes = vars(optimizer)  # TensorFlow must not track the placeholder
    slots = attributes["momentums"]
    attributes["momentums"] = collections.defaultdict(lambda: None)
    try:
        type(optimizer).update_step(optimizer, gradient, variable)
    finally:
        attributes["momentums"] = slots


def restore_momentum(optimizer: Optimizer, momentum: float) -> None:
    """Give an SGD the momentum back that :func:`clear_momentum` took, with slots for it if it was built meanwhile."""
    kind = family(optimizer)
    vars(optimizer).pop("update_step", None)
    if kind == LEGACY_V2:
        optimizer._momentum = bool(momentum)
        return
    optimizer.momentum = momentum
    if kind == KERAS3 and momentum and optimizer.built:
        make_slots(optimizer)


def make_slots(optimizer: Optimizer) -> None:
    """Make the momentum slots of a built SGD of Keras 3, which has none where its momentum was taken."""
    if not getattr(optimizer, "momentums", None):
        with tf.init_scope():
            optimizer.momentums = optimizer.add_optimizer_variables(optimizer._trainable_variables, "momentum")


def prepare_slots(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    """Make the slots for which ``tf.train.Checkpoint`` holds values that it has not found a place for yet.

    Args:
        optimizer: an SGD of either Keras; for others nothing is done.
        variables: what it will update.
    """
    kind = family(optimizer)
    if kind not in (KERAS3, LEGACY):
        return
    awaited = getattr(optimizer._variables, "_deferred_dependencies", {})
    if not any(name.isdigit() and found for name, found in awaited.items()):
        return
    with tf.init_scope():
        optimizer.build(list(variables))  # does nothing the second time
    if kind == KERAS3:
        make_slots(optimizer)


def momentum_slot(optimizer: Optimizer, variable: Variable) -> Any:
    """The variable in which an SGD keeps the velocity of ``variable``; None if there is none yet."""
    kind, raw = family(optimizer), raw_variable(variable)
    if kind == LEGACY_V2:
        return optimizer.get_slot(raw, "momentum") if "momentum" in optimizer.get_slot_names() else None
    slots = getattr(optimizer, "momentums", None) or []
    if kind == KERAS3:
        known = {id(raw_variable(v)): m for v, m in zip(optimizer._trainable_variables, slots, strict=False)}
        slot = known.get(id(raw))
        return None if slot is None else raw_variable(slot)
    place = getattr(optimizer, "_index_dict", {}).get(optimizer._var_key(raw)) if slots else None
    return None if place is None else slots[place]

"""Move SGD's momentum or Adam's first moment from the optimizer into the compressor, so that it is applied once.

Keras' velocity contains the learning rate: ``m <- mu*m - lr*g``. With ``u = -m/lr`` this is the core's
``u <- mu*u + g``, as long as lr is constant. When lr changes, u must be multiplied by lr_old/lr_new. Keras'
``weight_decay`` is decoupled from the gradient and stays in the optimizer.
"""

from __future__ import annotations

import collections
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from dgc.adapter.checks import warn_of_first_moment
from dgc.core.compressors import leaves_zeros
from dgc.core.config import NO_MEMORY, DGCConfig, bias_correction, running_mean
from dgc.core.exchange.step import Hyper
from dgc.errors import ConfigError
from dgc.tensorflow.tensors import Variable, raw_variable

Optimizer: TypeAlias = "tf.keras.optimizers.Optimizer"

KERAS3, LEGACY = "keras", "tf_keras"

# Classes of Keras 3 whose first moment is a running mean of gradients.
KIN = ("Adam", "AdamW", "Nadam", "Adamax")


_BETA1 = "dgc_beta_1"  # the name of the variable that replaces beta_1


class Taken(float):
    """A zero in place of an SGD's momentum that the compressor applies. The type shows that no user assigned it."""


# Methods, in Keras 3 or legacy Keras, through which gradients pass on their way to the variables.
_UPDATES = (
    "apply_gradients",
    "apply",
    "update_step",
    "_backend_apply_gradients",
    "_backend_update_step",
    "_internal_apply_gradients",
    "_clip_gradients",
)
# Packages whose optimizers are known not to change gradients before an SGD's update.
_KNOWN_UPDATES = ("keras", "tf_keras", "tensorflow", "horovod", "dgc")

# Options with which Keras' optimizers clip gradients or add them up, before momentum.
_BEFORE_MOMENTUM = ("clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps")


def family(optimizer: object) -> str | None:
    """Return the library that an optimizer belongs to, without importing it; None if the object is not an optimizer.

    Raises:
        ConfigError: the optimizer is from ``tf_keras.optimizers.legacy``.
    """
    for cls in type(optimizer).__mro__:
        module, name = cls.__module__, cls.__name__
        if module.startswith("keras.src.optimizers") and name in ("Optimizer", "BaseOptimizer"):
            return KERAS3
        if module.startswith("tf_keras.src.optimizers") and name == "OptimizerV2":
            chain = type(without_loss_scale(optimizer)).__mro__
            theirs = next(c.__name__ for c in chain if c.__module__.startswith("tf_keras.src.optimizers"))
            raise ConfigError(f"tf_keras.optimizers.legacy.{theirs} is not supported; use tf_keras.optimizers.{theirs}")
        if module.startswith("tf_keras.src.optimizers") and name in ("Optimizer", "_BaseOptimizer"):
            return LEGACY
        if module.startswith("tf_keras.src.mixed_precision") and name == "BaseLossScaleOptimizer":
            return LEGACY
    return None


def without_loss_scale(optimizer: Optimizer) -> Any:
    """Return the optimizer inside Keras' LossScaleOptimizer, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def optimizer_variables(optimizer: Optimizer | None) -> list[Any]:
    """Return all variables of an optimizer, including the learning rate, which legacy Keras does not list."""
    family(optimizer)  # refuses legacy optimizers, whose `variables` is a method
    listed = list(getattr(optimizer, "variables", []))
    rate = getattr(without_loss_scale(optimizer), "learning_rate", None)
    return [*listed, rate] if isinstance(raw_variable(rate), tf.Variable) else listed


def before_momentum(optimizer: Optimizer) -> str | None:
    """Return the option with which a Keras optimizer clips or adds up gradients, as "name=value"; None without one."""
    for name in _BEFORE_MOMENTUM:
        value = getattr(optimizer, name, None)
        # In Keras a threshold of 0 means no clipping, and a threshold may have any type that can be compared.
        if value is not None:
            with tf.init_scope():
                if float(value) > 0:
                    return f"{name}={value}"
    return None


def is_keras(optimizer: Optimizer, name: str) -> bool:
    """Return whether the optimizer is of the class ``name``, from Keras 3 or legacy Keras, or of a subclass."""
    return any(
        c.__module__.partition(".")[0] in ("keras", "tf_keras") and c.__name__ == name for c in type(optimizer).__mro__
    )


def own_update(optimizer: Optimizer) -> str | None:
    """Return the name of a user's method that may change gradients before they update variables; None without one.

    It may be a method of a subclass, or an attribute of this optimizer.
    """
    for owner in (optimizer, *type(optimizer).__mro__):
        for name in _UPDATES:
            method = getattr(owner, "__dict__", {}).get(name)
            method = getattr(method, "func", method)  # the function in a functools.partial
            if method is not None and str(getattr(method, "__module__", None)).partition(".")[0] not in _KNOWN_UPDATES:
                cls = owner if isinstance(owner, type) else type(optimizer)
                return f"{cls.__name__}.{name}()"
    return None


def get_momentum(optimizer: Optimizer) -> tuple[float, bool]:
    """Return an SGD's ``momentum`` and ``nesterov``. The momentum is 0 after :func:`clear_momentum`."""
    with tf.init_scope():
        return float(optimizer.momentum), bool(optimizer.nesterov)


def is_cleared(optimizer: Optimizer) -> bool:
    """Return whether a compressor has taken the momentum or beta_1, and none was assigned since then."""
    beta1 = getattr(optimizer, "beta_1", None)
    return isinstance(getattr(optimizer, "momentum", None), Taken) or getattr(beta1, "name", "").startswith(_BETA1)


def clear_momentum(optimizer: Optimizer) -> None:
    """Make an SGD apply no momentum. Its ``nesterov`` stays, and has no effect.

    The SGD also stops writing into its momentum slots. At a momentum of 0, ``tf_keras`` would keep its last update
    there. After the model is saved and loaded, the compressor would take this update for a dense run's momentum.
    """
    optimizer.momentum = Taken()
    if family(optimizer) == LEGACY:
        # Set this on the instance: a new class would be saved with the model, and could not be loaded without dgc.
        optimizer.update_step = functools.partial(_update_without_slots, optimizer)


def _update_without_slots(optimizer: Optimizer, gradient: object, variable: Variable) -> None:
    """Run the update of a ``tf_keras`` SGD, but hide its slots, so that it works without them."""
    attributes = vars(optimizer)  # not setattr(): TensorFlow must not track the placeholder
    slots = attributes["momentums"]
    attributes["momentums"] = collections.defaultdict(lambda: None)
    try:
        type(optimizer).update_step(optimizer, gradient, variable)
    finally:
        attributes["momentums"] = slots


def restore_momentum(optimizer: Optimizer, momentum: float) -> None:
    """Give an SGD back the momentum that :func:`clear_momentum` took. Make slots if it was built in the meantime."""
    vars(optimizer).pop("update_step", None)
    optimizer.momentum = momentum
    if family(optimizer) == KERAS3 and momentum and optimizer.built:
        make_slots(optimizer)


def make_slots(optimizer: Optimizer) -> None:
    """Make the momentum slots of a Keras 3 SGD that is already built.

    It has none if its momentum was taken before it was built.
    """
    if not getattr(optimizer, "momentums", None):
        with tf.init_scope():
            optimizer.momentums = optimizer.add_optimizer_variables(optimizer._trainable_variables, "momentum")


def prepare_slots(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    """Make an SGD's momentum slots if ``tf.train.Checkpoint`` has loaded values for them."""
    awaited = getattr(optimizer._variables, "_deferred_dependencies", {})
    if not any(name.isdigit() and found for name, found in awaited.items()):
        return
    with tf.init_scope():
        optimizer.build(list(variables))  # does nothing the second time
    if family(optimizer) == KERAS3:
        make_slots(optimizer)


def momentum_slots(optimizer: Optimizer, variables: Sequence[Variable]) -> list[Any]:
    """Return, for each of ``variables``, the variable in which an SGD keeps its velocity, or None."""
    raws, slots = [raw_variable(v) for v in variables], getattr(optimizer, "momentums", None) or []
    if family(optimizer) == KERAS3:
        return slots_of(optimizer, slots, raws)
    places = [getattr(optimizer, "_index_dict", {}).get(optimizer._var_key(raw)) if slots else None for raw in raws]
    return [None if place is None else slots[place] for place in places]


def slots_of(optimizer: Optimizer, slots: Sequence[Any], variables: Sequence[Variable]) -> list[Any]:
    """Return, for each of ``variables``, its slot in an optimizer of Keras 3, or None."""
    known = {id(raw_variable(v)): slot for v, slot in zip(optimizer._trainable_variables, slots, strict=False)}
    return [raw_variable(known.get(id(raw_variable(v)))) for v in variables]


def first_moments(optimizer: Optimizer) -> list[Any]:
    """Return the slots in which Keras 3's Adam and its relatives keep their first moment."""
    return list(getattr(optimizer, "_momentums", getattr(optimizer, "_m", None)) or [])


# Loads u of a variable: (place among the members, (numel,) values, learning rate of the velocity or None).
Absorb = Callable[[int, np.ndarray, "float | None"], None]


class FirstMoment:
    """The first moment of Keras 3's Adam and its relatives. The compressor applies it once entries are selected.

    Until then every step is Adam's own. The optimizer's attribute ``beta_1`` holds a variable that a traced step reads.
    From the first step that selects entries on, the exchange sets it to 0 before the update. For the meaning of
    u from then on, see :mod:`dgc.core.config`.

    Attributes:
        beta1: the user's beta1.
        is_taken: whether the compressor applies the moment in this step.
        earlier_steps: the number of steps that the optimizer had made before the compressor's first one; None before
            that step.
    """

    def __init__(self, optimizer: Any, nesterov: bool) -> None:
        """Replace the optimizer's beta_1 by a variable of the same value."""
        self._optimizer, self._nesterov = optimizer, nesterov
        self.is_taken, self.beta1 = False, float(optimizer.beta_1)
        self._former = self.beta1
        with tf.init_scope():
            self._variable = tf.Variable(self.beta1, trainable=False, dtype=tf.float32, name=_BETA1)
        self.earlier_steps: int | None = None
        self.follow()

    def follow(self) -> None:
        """Take over a beta_1 that the user has assigned since the last step."""
        attributes = vars(self._optimizer)  # not setattr(): Keras would save the variable with the model
        if attributes["beta_1"] is not self._variable:
            self.beta1 = float(attributes["beta_1"])
            attributes["beta_1"] = self._variable

    def give_back(self) -> None:
        """Give the optimizer back its beta_1, and with that its first moment, for good."""
        vars(self._optimizer)["beta_1"] = self.beta1
        self.clear_slots()

    def clear_slots(self) -> None:
        """If the compressor applies the moment, set its slots to 0, as in a saved model. They hold the last results.

        The next update ``m + (g - m)`` depends on them by its rounding. So call this on all ranks at the same step.
        """
        for slot in first_moments(self._optimizer) if self.is_taken else ():
            slot.assign(tf.zeros(slot.shape, slot.dtype))

    def begin(self, hyper: Hyper, steps: int, scale: Callable[[float], None], *, selects: bool) -> None:
        """Set the options of all variables for a step.

        ``steps`` is the number of steps that the compressor has made. ``scale`` multiplies u by a factor. ``selects``
        says whether this step selects entries.
        """
        made, count = steps + (self.earlier_steps or 0), len(hyper.momentum)
        if self.is_taken and made and self.beta1 != self._former:
            # u is Adam's m, divided by the bias correction of beta1. A new beta1 does not change m.
            scale(bias_correction(self._former, made) / bias_correction(self.beta1, made))
        self.is_taken, self._former = selects, self.beta1
        momentum, gain = running_mean(self.beta1, 1 + made) if self.is_taken else (0.0, 1.0)
        hyper.momentum[:], hyper.gain[:] = [momentum] * count, [gain] * count
        hyper.nesterov[:] = [self._nesterov] * count

    def absorb(self, variables: Sequence[Variable], steps: int, absorb: Absorb) -> None:
        """When selection begins, turn Adam's first moments into u, with bias correction. ``steps`` is as in begin()."""
        made = steps + (self.earlier_steps or 0)
        if not (self.is_taken and made):
            return
        for place, slot in enumerate(slots_of(self._optimizer, first_moments(self._optimizer), variables)):
            values = None if slot is None else np.asarray(slot)
            if values is not None and values.any():
                absorb(place, values.reshape(-1) / values.dtype.type(bias_correction(self.beta1, made)), None)

    def assign(self, verdict: tf.Tensor) -> None:
        """Set the optimizer's beta_1 after the exchange that returns ``verdict``: now, or in the graph being built."""
        value = functools.partial(_value, weakref.ref(self))  # TensorFlow never drops a function that a graph calls
        if tf.executing_eagerly():
            self._variable.assign(value())
            return
        beta1 = tf.numpy_function(value, [verdict], tf.float32, name=_BETA1)
        beta1.set_shape(())
        self._variable.assign(beta1)


def _value(reference: weakref.ref[FirstMoment], *_: object) -> np.float32:
    moment = reference()
    return np.float32(0.0 if moment is None or moment.is_taken else moment.beta1)


class Adoption:
    """The momentum options of one compressor: taken from an optimizer, or given to the compressor.

    Attributes:
        hyper: the options by variable index, as the core uses them.
        optimizer: the user's optimizer or None.
        active: whether the optimizer's momentum may be taken.
        left_for: the reason why momentum stays in the optimizer: an option that clips or adds up gradients, or a user's
            method; None if momentum does not stay there.
        moment: Adam's first moment, if the compressor applies it once entries are selected; else None.
        is_loss_scaled: whether a LossScaleOptimizer was given.
        taken: whether a momentum was taken, even if that momentum is 0 now.
        momentum, nesterov: the options that were taken; 0 and False if none were.
    """

    def __init__(self, optimizer: Optimizer | None, config: DGCConfig) -> None:
        """Take the momentum out of ``optimizer``, if possible before it has made slots for it.

        Once momentum is taken, the exchange returns velocities. So an optimizer that clips or adds up gradients, or
        whose update method comes from the user, keeps its momentum, and the compressor does plain error feedback.
        """
        self.is_loss_scaled = without_loss_scale(optimizer) is not optimizer
        self.optimizer = optimizer = without_loss_scale(optimizer)
        if is_cleared(optimizer):
            raise ConfigError(
                "another compressor has taken this optimizer's momentum already, and residuals cannot be shared: build "
                "the compressor once, outside the training step"
            )
        self.active = is_keras(optimizer, "SGD") and config.momentum is None
        self.left_for: str | None = None
        self._config = config
        if leaves_zeros(config) and not config.steps_ahead:
            _look_at_update(optimizer, config.algorithm)
        own = own_update(optimizer)
        found = before_momentum(optimizer) or own
        if self.active and found and get_momentum(optimizer)[0]:
            self.active, self.left_for = False, found
        self.active = self.active and not own  # a momentum that is assigned later is not taken either
        self.moment: FirstMoment | None = None
        if config.momentum is None and family(optimizer) == KERAS3 and any(is_keras(optimizer, name) for name in KIN):
            if not found:
                self.moment = FirstMoment(optimizer, bool(config.nesterov) or is_keras(optimizer, "Nadam"))
                self._keep_config()
            elif optimizer.beta_1:
                self.left_for = found
        self.momentum, self.nesterov = 0.0, False
        self.hyper = Hyper([], [], [], [])
        self.taken = False
        self.take()
        warn_of_first_moment(type(optimizer).__name__, getattr(optimizer, "beta_1", None), config.momentum)

    def learning_rate(self, copy: Optimizer | None = None) -> Any:
        """Return the rate that the optimizer, or Horovod's copy of it, will apply in this step; None if not known."""
        optimizer: Any = None if self.optimizer is None else copy or self.optimizer
        if family(optimizer) != LEGACY:
            return getattr(optimizer, "learning_rate", None)
        # With a schedule, legacy Keras' `learning_rate` still belongs to the previous step.
        rate = optimizer._learning_rate
        return rate(optimizer.iterations) if callable(rate) and not isinstance(rate, tf.Variable) else rate

    def constant_options(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks, except for the learning rate, which each step compares.

        Only numbers are compared; anything else is None.
        """
        if self.optimizer is None:
            return {}
        try:
            with tf.init_scope():
                config = dict(self.optimizer.get_config())
        except Exception:  # training does not need a user's own get_config(), so it may be unfinished
            return {}
        config = config.get("inner", config)  # legacy Keras' distributed optimizer keeps its settings beside
        return {name: _number(v) for name, v in config.items() if name not in ("learning_rate", "jit_compile")}

    @property
    def steps(self) -> int:
        """The number of steps that the optimizer has made; 0 without an optimizer."""
        if self.optimizer is None:
            return 0
        with tf.init_scope():
            return int(np.asarray(raw_variable(self.optimizer.iterations)))

    def take(self) -> None:
        """Move the optimizer's momentum, if it holds one, into the compressor.

        This is done in every step, because a user may assign another momentum, or 0, during training.
        """
        if self.moment is not None:
            self.moment.follow()
        momentum, nesterov = get_momentum(self.optimizer) if is_keras(self.optimizer, "SGD") else (0.0, False)
        own = self._config.momentum
        adopts = self.active and bool(self.taken or momentum)
        if (adopts or own or self.moment is not None) and (found := before_momentum(self.optimizer)):
            raise ConfigError(
                f"the optimizer's {found} comes before momentum, and would act on the velocity that the compressor "
                "makes: leave momentum to the optimizer (set the option before the compressor is built, or pass "
                "momentum=0 to the compressor); or clip with the compressor's local_grad_clip_norm, and accumulate "
                "with backward_passes_per_step of the distributed optimizer"
            )
        if momentum and own and not self.active:
            raise ConfigError(
                f"momentum would be applied twice: the compressor has momentum={own} and the optimizer has "
                f"momentum={momentum}; leave momentum out of the compressor (it adopts the optimizer's), or set the "
                "optimizer's to 0"
            )
        if not adopts:
            return
        if self.taken and is_cleared(self.optimizer):
            momentum = momentum or self.momentum
            if (momentum, nesterov) == (self.momentum, self.nesterov):
                return
        self.momentum, self.nesterov = momentum, nesterov
        clear_momentum(self.optimizer)
        self.taken = True
        self.cover(len(self.hyper.momentum))
        self._keep_config()

    def give_back(self) -> None:
        """Give the optimizer its momentum back, and stop taking it."""
        if self.moment is not None:
            self.moment.give_back()
        if self.taken:
            restore_momentum(self.optimizer, self.momentum)
        if self.moment is not None or self.taken:
            vars(self.optimizer).pop("get_config", None)
        self.active, self.taken, self.moment = False, False, None

    def follow(self, optimizer: Optimizer | None) -> None:
        """Take the momentum of Horovod's copy of the optimizer, because the copy makes the steps."""
        copy = without_loss_scale(optimizer)
        if self.taken and copy is not self.optimizer and is_keras(copy, "SGD"):
            clear_momentum(copy)
            self.optimizer = copy
            self._keep_config()

    def cover(self, count: int) -> None:
        """Set ``hyper`` for ``count`` variables."""
        config = self._config
        momentum = self.momentum if self.active else config.momentum or 0.0
        if self.taken and not momentum and family(self.optimizer) == LEGACY:
            momentum = NO_MEMORY  # u keeps the last gradient, as tf_keras keeps its last update, for a later momentum
        nesterov = config.nesterov if config.nesterov is not None else self.nesterov
        decay = config.weight_decay or 0.0
        self.hyper = Hyper([momentum] * count, [bool(nesterov)] * count, [decay] * count, [1.0] * count)

    def decayed(self, index: int, variable: Variable) -> tf.Tensor:
        """Return the tensor that weight decay multiplies: the variable's values."""
        return raw_variable(variable)

    def absorb_slots(self, variables: Sequence[Variable], all_variables: Sequence[Variable], absorb: Absorb) -> bool:
        """Move the momentum slots of a dense run from the optimizer into u; return whether there were any."""
        found = False
        if not (self.active and self.momentum):
            return found
        prepare_slots(self.optimizer, all_variables)
        with tf.init_scope():
            rate = float(self.learning_rate())
            factor = -1.0 / rate if rate else 0.0
            for index, slot in enumerate(momentum_slots(self.optimizer, variables)):
                if slot is None:
                    continue
                values = np.asarray(slot)
                if values.any():
                    absorb(index, values.reshape(-1) * values.dtype.type(factor), rate)
                    slot.assign(tf.zeros(slot.shape, slot.dtype))
                    found = True
        return found

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return ``config``, the optimizer's configuration, with the user's momentum, as in a dense run."""
        # A momentum or beta_1 that was assigned since the last step is in ``config`` already.
        if self.moment is not None and isinstance(config.get("beta_1"), tf.Variable):
            return {**config, "beta_1": self.moment.beta1}
        return {**config, "momentum": self.momentum} if isinstance(config.get("momentum"), Taken) else config

    def _keep_config(self) -> None:
        """Let the optimizer's ``get_config()`` return the user's momentum."""
        # Set on the instance: a new class would be saved with the model, and could not be loaded without dgc.
        self.optimizer.get_config = self._own_config

    def _own_config(self) -> dict[str, Any]:
        return self.config(type(self.optimizer).get_config(self.optimizer))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, np.floating) else value if isinstance(value, (int, float)) else None


def _look_at_update(optimizer: Optimizer | None, algorithm: str) -> None:
    """Refuse an optimizer that fails on gradients with few entries, or warn about one that works badly with these."""
    # Adafactor divides by the product of two means of squares. If a row and a column of the gradient hold only zeros,
    # both means are epsilon_1; their product must not be 0 in float32.
    if optimizer is not None and is_keras(optimizer, "Adafactor") and optimizer.epsilon_1 < 1e-16:
        raise ConfigError(
            f"Keras' Adafactor with epsilon_1={optimizer.epsilon_1:g} makes NaN of gradients with few entries, as "
            f"{algorithm!r} sends them: give it epsilon_1=1e-12, or take an optimizer that docs/options.md calls sound"
        )
    if is_keras(optimizer, "Lion"):
        warnings.warn(
            f"{algorithm!r} sends few entries, and Lion keeps moving by the sign of the last one: begin with a tenth "
            "of dense training's learning rate, or take one of the optimizers that docs/options.md calls sound",
            RuntimeWarning,
            stacklevel=4,
        )


def is_adaptive(optimizer: Optimizer | None) -> bool:
    """Return whether this is a Keras optimizer that divides by the size of past gradients, or takes their sign."""
    others = ("Adagrad", "Adadelta", "Adafactor", "RMSprop", "Lion")
    return optimizer is not None and any(is_keras(optimizer, name) for name in (*KIN, *others))

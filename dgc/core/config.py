"""The checked options of a compressor, and the values of a step that follow from them."""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

from dgc.core.checks import (
    as_patterns,
    as_sparsities,
    plain,
    require_choice,
    require_flag,
    require_integer,
    require_number,
)
from dgc.errors import ConfigError

# Bytes of dense float32 gradients in a bucket.
DEFAULT_BUCKET_BYTES = 25 * 2**20

# The lowest density at which an adaptive optimizer was seen to learn well, and the density to use for a short training.
ADAPTIVE_FLOOR, ADAPTIVE_CEILING = 1 / 64, 0.05

# The densities for an adaptive optimizer with step-ahead error feedback, in the first fifth of the steps and later, by
# the largest number of ranks that they are for. If the number of steps is unknown, the first 1,000 steps count as the
# first fifth. docs/decisions.md has the reasons.
AHEAD_FIRST_STEPS = 1000
AHEAD_DENSITIES = (
    (2, (0.1, 0.02)), (4, (0.032, 0.032)), (8, (0.05, 0.05)), (16, (0.1, 0.1)), (math.inf, (0.5, 0.5))
)  # fmt: skip

# The lowest beta2 for sparse results. An entry arrives rarely, so its mean of squares must last through the pauses. At
# the beginning the entries still grow, and a long memory would make updates too large. So this limit applies only after
# 30 % of the steps.
ADAPTIVE_BETA2 = 0.99

# Entries of one tensor may differ much in size, and Adam moves their parameters by about the same. With two bits, whose
# error is large for small entries, larger GPTs learnt more slowly: see benchmarks/results/README.md.
ADAPTIVE_VALUES = "int4"

# Digits of a density in a log: 1 - 0.999 is 0.0010000000000000009 in float64.
DENSITY_DIGITS = 12

# When beta1 to the power of the step is below this number, u needs no bias correction.
_SETTLED = 1e-9

# The correction of the first moment's bias counts this many steps more than were made. Masking sets the mean of a sent
# entry to 0, from where it grows again. Adam's own correction enlarges the first means (ten times at a beta1 of 0.9),
# but not these later ones. So the mean of squares remembers large early means, and updates stay too small for long.
# Without any correction, the mean is still growing when the learning rate is highest, and updates are too large.
# benchmarks/results/README.md has figures.
STEPS_BEFORE = 3

# The momentum if beta1 is 0. It is so small that u becomes the gradient. It is not 0, because the kernels do not write
# u if the momentum is 0.
NO_MEMORY = 1e-30


@dataclass(frozen=True, kw_only=True)
class DGCConfig:
    """The options that determine the mathematics and the bytes of an exchange. They must be equal on all ranks.

    tools/write_signatures.py copies the comments above the fields into the constructors' docstrings.
    """

    # The share of entries that are held back in a step. A list gives the shares to use one after another during the
    # ramp-up. None: 0.999. With step-ahead error feedback and an adaptive optimizer, None is 0.9 in the first 1,000
    # steps and 0.98 later on two ranks, 0.968 on three and four, 0.95 on five to eight, 0.9 on nine to 16, and 0.5 on
    # more.
    sparsity: tuple[float, ...] | None = None
    # The number of optimizer steps in the training; dgc chooses the sparsity for it.
    steps: int | None = None
    # The first step that is compressed; gradients (step-ahead: updates) of earlier steps are averaged uncompressed.
    rampup_begin_step: int = 0
    # The number of steps over which a list of sparsities is spread.
    rampup_step: int = 1
    # The momentum that the compressor applies. None takes over the optimizer's momentum or Adam's beta1; 0 leaves
    # momentum to the optimizer.
    momentum: float | None = None
    # Whether this is Nesterov momentum; None takes the answer from the optimizer.
    nesterov: bool | None = None
    # The parameter times this number is added to its gradient; None takes over the optimizer's weight decay.
    weight_decay: float | None = None
    # Set the momentum of an entry to 0 when the entry is sent; None: yes, except with ``steps`` and SGD.
    momentum_masking: bool | None = None
    # Scale each rank's gradient to an L2 norm of at most this number times the square root of the number of ranks.
    local_grad_clip_norm: float | None = None
    # The norm that is limited. "tensor": the norm of each compressed tensor. "global": the norm of all gradients
    # together, also before ``rampup_begin_step``.
    clip_scope: Literal["tensor", "global"] = "tensor"
    # Tensors with fewer elements are not compressed; they are sent in the form that ``small`` names.
    min_numel: int = 1024
    # Name patterns (of ``fnmatch``) of tensors that are compressed even if they are 1-D or small.
    include: tuple[str, ...] = ()
    # Name patterns of tensors that are never compressed but sent as float32.
    exclude: tuple[str, ...] = ()
    # The codec for the positions of sent entries.
    indices: str = "elias_fano"
    # The codec for the values of sent entries. The default is "int4" with ``steps`` and an adaptive optimizer, and else
    # "int2".
    values: str | None = None
    # The codec for tensors that are 1-D or small; "float32" sends them exactly.
    small: str = "int3"
    # Bytes of float32 gradients that are sent together in one message.
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    # Average or sum: Horovod's constant, or the name "average" or "sum".
    op: str = "average"
    # True: the ranks of a node add up their gradients and send as one rank. "auto": only if that saves traffic. A
    # number: groups of this many neighbouring ranks do so.
    hierarchical: bool | int | Literal["auto"] = False
    # "auto": where it saves enough bytes (from about 16 ranks on), each rank adds up a share of the positions for all
    # ranks. "gather": every rank receives the messages of all others.
    exchange: Literal["auto", "gather"] = "auto"
    # Seed of the random numbers. These also depend on rank, step and tensor.
    seed: int = 0
    # "step-ahead": the optimizer steps on its rank's own gradient, updates are exchanged, and a rank uses at once what
    # it has not sent. "classic": gradients are exchanged, as in the paper. "auto": "step-ahead" for an adaptive
    # optimizer in PyTorch and Keras 3, unless an option is given that only "classic" has, or the sparsity is 0; else
    # "classic". False drops what is not sent, for control experiments: accuracy collapses.
    error_feedback: Literal["auto", "step-ahead", "classic", False] = "auto"
    # With step-ahead error feedback: apply the other ranks' contributions one step late. The network's time then lies
    # behind the next forward and backward pass.
    late: bool = False
    # The compressor's name in the registry, and the options that only this compressor has.
    algorithm: str = "dgc"
    own: Any = None

    def __post_init__(self) -> None:
        """Turn sequences into tuples; raise a ConfigError about an option that is out of range."""
        set_ = object.__setattr__
        for option in dataclasses.fields(self):
            set_(self, option.name, plain(getattr(self, option.name)))
        if self.sparsity is not None or self.algorithm != "dgc":
            set_(self, "sparsity", as_sparsities(self.sparsity))
        for name in ("include", "exclude"):
            set_(self, name, as_patterns(name, getattr(self, name)))
        require_number("momentum", self.momentum, low=0.0, high=1.0, high_open=True, optional=True)
        require_number("weight_decay", self.weight_decay, low=0.0, optional=True)
        require_number("local_grad_clip_norm", self.local_grad_clip_norm, low=0.0, low_open=True, optional=True)
        require_integer("rampup_begin_step", self.rampup_begin_step, 0)
        require_integer("rampup_step", self.rampup_step, 1)
        require_integer("min_numel", self.min_numel, 0)
        require_integer("bucket_bytes", self.bucket_bytes, 1)
        require_integer("seed", self.seed, 0)
        require_flag("nesterov", self.nesterov, optional=True)
        require_flag("momentum_masking", self.momentum_masking, optional=True)
        require_choice("error_feedback", self.error_feedback, ("auto", "step-ahead", "classic", False))
        require_flag("late", self.late)
        require_choice("clip_scope", self.clip_scope, ("tensor", "global"))
        require_choice("op", self.op, ("average", "sum"))
        require_choice("exchange", self.exchange, ("auto", "gather"))
        if not isinstance(self.hierarchical, bool) and self.hierarchical != "auto":
            if isinstance(self.hierarchical, str):
                raise ConfigError(
                    f"hierarchical is {self.hierarchical!r}; give True, False, 'auto' or a number of ranks"
                )
            require_integer("hierarchical", self.hierarchical, 2)
        if self.error_feedback == "step-ahead" and (given := [n for n in self._classic_options() if getattr(self, n)]):
            raise ConfigError(
                f"{', '.join(given)}: with error_feedback='step-ahead' the optimizer keeps its momentum and weight "
                "decay, and the script clips gradients: leave these options out, or give error_feedback='classic'"
            )
        if self.error_feedback == "step-ahead" and self.op == "sum":
            raise ConfigError(
                "error_feedback='step-ahead' averages updates: use op='average' and a larger learning rate"
            )
        if self.error_feedback == "step-ahead" and self.hierarchical:
            raise ConfigError("error_feedback='step-ahead' does not support hierarchical=: leave it out")
        if self.late and self.error_feedback != "step-ahead":
            raise ConfigError("late=True needs error_feedback='step-ahead'")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("nesterov=True needs momentum > 0; give a momentum, or leave nesterov out")

    def _classic_options(self) -> list[str]:
        """List the given options that only classic error feedback has."""
        names = ("momentum", "nesterov", "weight_decay", "momentum_masking", "local_grad_clip_norm")
        return [name for name in names if getattr(self, name) is not None]

    def _may_step_ahead(self) -> bool:
        """Return whether the user has left the choice to dgc, with no option that only classic error feedback has.

        If everything is sent, gradients are averaged, which equals dense training; averaged updates do not.
        """
        needs_classic = self._classic_options() or self.op == "sum" or self.hierarchical or not any(self.sparsities)
        return self.error_feedback == "auto" and not needs_classic

    @property
    def sparsities(self) -> tuple[float, ...]:
        """The sparsities that are used one after another."""
        return self.sparsity or (0.999,)

    @property
    def steps_ahead(self) -> bool:
        """Whether updates are exchanged instead of gradients."""
        return self.error_feedback == "step-ahead"

    def suited(self, adaptive: bool, *, steps_ahead: bool = False) -> DGCConfig:
        """Return the config for an optimizer.

        An adaptive optimizer gets step-ahead error feedback if the adapter can exchange updates (``steps_ahead``). If
        the user gives no sparsity, :meth:`on_ranks` chooses it then, which a sparsity of None stands for. With classic
        error feedback, the option ``steps`` gives an adaptive optimizer a larger density.

        Warns:
            RuntimeWarning: there is a ``rampup_step``, and only one sparsity.
        """
        suited = self._suited(adaptive, steps_ahead=steps_ahead)
        if suited.rampup_step > 1 and suited.sparsity is not None and len(set(suited.sparsity)) == 1:
            warnings.warn(
                f"rampup_step={suited.rampup_step} has no effect, because the sparsity is {suited.sparsity[0]} in all "
                "steps: give a list, as in sparsity=[0.75, 0.9375, 0.984375, 0.996, 0.999], or leave rampup_step out",
                RuntimeWarning,
                stacklevel=4,
            )
        return suited

    def _suited(self, adaptive: bool, *, steps_ahead: bool) -> DGCConfig:
        if not adaptive or self.algorithm != "dgc":
            return dataclasses.replace(self, sparsity=self.sparsities)
        ahead = self.steps_ahead or (steps_ahead and self._may_step_ahead())
        chosen = dataclasses.replace(self, error_feedback="step-ahead") if ahead else self
        # With more entries at the beginning, training does not stay on a plateau: see benchmarks/results/README.md.
        # The first sparsity holds for half of the ramp-up.
        rampup_step = 2 * AHEAD_FIRST_STEPS if self.steps is None else max(1, 2 * self.steps // 5)
        if self.rampup_step > 1:
            rampup_step = self.rampup_step
        if ahead and (self.steps is not None or self.sparsity is None):  # with steps, it is that of of_steps()
            return dataclasses.replace(chosen, sparsity=None, rampup_step=rampup_step)
        if self.steps is None:
            return dataclasses.replace(chosen, sparsity=self.sparsities)
        density = min(ADAPTIVE_CEILING, max(ADAPTIVE_FLOOR, 100 / self.steps))
        return dataclasses.replace(
            self,
            sparsity=_sparsities(3 * density, density),
            rampup_step=rampup_step,
            momentum_masking=self.momentum_masking is not False,
            values=self.values or ADAPTIVE_VALUES,
        )

    def on_ranks(self, ranks: int) -> DGCConfig:
        """Return the config of :meth:`suited` for a number of ranks."""
        if self.sparsity is not None or not self.steps_ahead:
            return self
        densities = next(densities for most, densities in AHEAD_DENSITIES if ranks <= most)
        return dataclasses.replace(self, sparsity=_sparsities(*densities))

    def least_beta2(self, step: int) -> float:
        """Return the least decay that an adaptive optimizer's second moment may have in a step."""
        return ADAPTIVE_BETA2 if self.steps is not None and step >= 0.3 * self.steps else 0.0

    @property
    def keeps_residual(self) -> bool:
        """Whether entries that are not sent are kept."""
        return self.error_feedback is not False

    @property
    def masks(self) -> bool:
        """Whether momentum factor masking is on."""
        return self.steps is None if self.momentum_masking is None else self.momentum_masking

    @property
    def value_codec(self) -> str:
        """The name of the codec for values."""
        return self.values or "int2"

    @property
    def is_thin(self) -> bool:
        """Whether too few entries are sent for an adaptive optimizer; the option ``steps`` would send more."""
        return self.algorithm == "dgc" and self.steps is None and self.sparsities[-1] > 1.0 - ADAPTIVE_FLOOR

    def own_share(self, ranks: int) -> float:
        """Return one rank's share of the reduced momentum: 1 for an average, 1 / P for a sum.

        The u of a sparsified tensor holds this share, even while the tensor is sent dense.
        """
        return 1.0 / ranks if self.op == "sum" else 1.0

    def describe(self) -> dict[str, Any]:
        """Return the options as plain values, in a fixed order, for the ranks to compare."""
        # The name is first, because a different name explains all other differences.
        options = {"algorithm": self.algorithm, **dataclasses.asdict(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}


@dataclass(frozen=True)
class Schedule:
    """The sparsity of each step.

    Before the step ``begin`` everything is dense. For the next ``length`` steps, each sparsity of the list holds for an
    equal part of them. Afterwards the last one holds: ``i = int((step - begin) * len / length)``, at most ``len - 1``.

    Source: Paddle's ``DGCMomentumOptimizer`` (its sparsity, rampup_begin_step, rampup_step).
    """

    sparsity: tuple[float, ...]
    begin: int = 0
    length: int = 1

    def density(self, step: int) -> float:
        """Return the share of entries that is sent in ``step``; 1 before the ramp-up."""
        if step < self.begin:
            return 1.0
        i = (step - self.begin) * len(self.sparsity) // self.length
        return 1.0 - self.sparsity[min(i, len(self.sparsity) - 1)]

    def selects_from(self) -> int | None:
        """Return the first step in which entries are selected; None if the sparsity is always 0."""
        positive = [i for i, sparsity in enumerate(self.sparsity) if sparsity]
        return self.begin - -positive[0] * self.length // len(self.sparsity) if positive else None

    def ramp_end(self) -> int:
        """Return the first step in which the last sparsity of the list holds."""
        count = len(self.sparsity)
        return self.begin + -(-(count - 1) * self.length // count)


def _sparsities(*densities: float) -> tuple[float, ...]:
    return tuple(1.0 - density for density in densities)


def of_steps(steps: int | None = None, **options: Any) -> dict[str, Any]:
    """Return the options. If ``steps`` is given, add a sparsity that suits a training of this length.

    The density is 100 / steps, so that each entry is sent about a hundred times, but at least 0.1 % and at most 1/64.
    There is no ramp-up, because it costs progress at the beginning. :meth:`DGCConfig.suited` changes this for adaptive
    optimizers.

    Raises:
        ConfigError: ``steps`` is not a whole number >= 1, or the sparsity is given as well.
    """
    if steps is None:
        return options
    require_integer("steps", steps := plain(steps), 1)
    if both := {name for name in ("sparsity", "rampup_step") if options.get(name) is not None}:
        raise ConfigError(f"steps={steps} chooses the sparsity: give steps or {' and '.join(sorted(both))}, not both")
    density = min(1 / 64, max(0.001, 100 / steps))
    return {**options, "sparsity": 1.0 - density, "steps": steps}


def entries_to_send(numel: int, density: float) -> int:
    """Return k = max(1, int(n * density)), at most n; 0 for an empty tensor.

    In float64, ``1 - 0.9`` is a little below 0.1. So the product is raised by a relative 1e-9 before rounding down.
    """
    if numel == 0:
        return 0
    return min(numel, max(1, int(numel * density * (1 + 1e-9))))


def bias_correction(beta1: float, t: int) -> float:
    """Return the divisor that corrects the bias of Adam's first moment after ``t`` steps.

    A few steps are added to ``t``; see :data:`STEPS_BEFORE`.
    """
    rest = beta1 ** (t + STEPS_BEFORE)
    return 1.0 if rest < _SETTLED else 1.0 - rest


def is_settled(beta1: float, t: int) -> bool:
    """Return whether :func:`running_mean` returns the same values from step ``t`` on."""
    return bias_correction(beta1, t) == 1.0


def running_mean(beta1: float, t: int) -> tuple[float, float]:
    """Return the momentum and gain that make u Adam's bias-corrected first moment in step ``t``, counted from 1.

    The compressor computes ``u <- a*u + b*g``, and Adam ``m <- beta1*m + (1 - beta1)*g``. u equals ``m / c(t)`` if
    ``a = beta1 * c(t-1) / c(t)`` and ``b = (1 - beta1) / c(t)``. c is :func:`bias_correction`, and a + b is 1.

    Source: Kingma and Ba 2015, arXiv 1412.6980, algorithm 1.
    """
    now = bias_correction(beta1, t)
    kept = beta1 if now == 1.0 else beta1 * bias_correction(beta1, t - 1) / now
    return max(kept, NO_MEMORY), (1.0 - beta1) / now

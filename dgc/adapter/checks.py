"""Checks of the arguments of wrappers and constructors in all frameworks, and warnings about them.

Checks of single values are in :mod:`dgc.core.checks`, checks of saved states in :mod:`dgc.core.saved`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from dgc.core.checks import brief, plain, require_integer, require_number
from dgc.core.config import DGCConfig
from dgc.errors import ConfigError


def checked_tensors(value: object, algorithm: str, name: str, advice: str) -> list[Any]:
    """Return a compressor's tensors as a list; raise an error if there are none.

    Errors call the tensors ``name``, and advise the user to pass ``advice``.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(
            f"the {name} are {brief(value)}; pass {advice}, and options by their names: "
            f"Compression.{algorithm}(sparsity=0.999)"
        )
    tensors = list(value)
    if not tensors:
        raise ConfigError(
            f"Compression.{algorithm} has nothing to compress: pass {advice} (a generator can be used once only)"
        )
    return tensors


def require_momentum_source(optimizer: object, config: DGCConfig, given: str) -> None:
    """Require ``momentum=`` or ``optimizer=``; ``given`` names the argument that holds the tensors."""
    if optimizer is None and config.momentum is None:
        raise ConfigError(
            f"Compression.{config.algorithm}({given}) also needs optimizer=, to take its momentum over; pass it, or "
            "momentum=0 for plain error feedback"
        )


def refuse_grouping(num_groups: object, groups: object) -> None:
    """Refuse Horovod's options that group gradients, because the core forms buckets itself."""
    if num_groups or groups is not None:
        raise ConfigError(
            "groups and num_groups have no meaning here: the compressor forms its own buckets; leave them out "
            "(bucket_bytes= of the compressor sets their size)"
        )


def check_passes(passes: object) -> None:
    """Check ``backward_passes_per_step``."""
    require_integer("backward_passes_per_step", plain(passes), 1)


def check_predivide(factor: object, op_name: str) -> None:
    """Check ``gradient_predivide_factor``. A compressor ignores it, because it divides only once, in float32."""
    require_number("gradient_predivide_factor", factor, low=0.0, low_open=True)
    if factor != 1.0 and op_name == "sum":
        raise ConfigError("gradient_predivide_factor needs op=hvd.Average: a sum is not divided; leave it out")


def warn_of_thin_updates(optimizer: str, config: DGCConfig) -> None:
    """Warn if an adaptive optimizer would learn little because few entries are sent. Call it on one rank."""
    if config.is_thin:
        remedy = "Leave sparsity= out, or give" if config.steps_ahead else "Give"
        warnings.warn(
            f"{optimizer} does not move an entry in proportion to its gradient. When only "
            f"{1 - config.sparsities[-1]:.2%} of the entries are sent, it learns less than in dense training, and far "
            f"less with classic error feedback or many ranks. {remedy} Compression.dgc(steps=N), which chooses a "
            "density for a training of N optimizer steps",
            RuntimeWarning,
            stacklevel=4,
        )


def warn_of_more_steps(steps: int) -> None:
    """Warn that more steps were made than the option ``steps`` says. Call it on one rank."""
    warn_once(
        f"this training has more steps than Compression.dgc(steps={steps}) says: give the number of optimizer steps in "
        "the whole training, for example epochs * len(loader). If it began on another number of ranks, that is the "
        "number of steps made before plus those to come. dgc chooses from it how much to send. With step-ahead error "
        "feedback, it averages the parameters in the step of this number, and not later: call average() at the end"
    )


def warn_of_sparsity(config: DGCConfig, given: Collection[str], adaptive: bool) -> None:
    """Warn if the sparsity seems to be a mistake, or if SGD has the default one. Call it on one rank.

    ``given`` has the names of the options that the user has given. ``adaptive`` says whether the optimizer is adaptive;
    :func:`warn_of_thin_updates` warns about such an optimizer.
    """
    held = config.sparsities[-1]
    if 0 < held < 0.5 and "sparsity" in given:
        warn_once(
            f"sparsity={held:g} is the share of the entries that is held back, so each step sends {1 - held:.1%} of "
            f"them: to send {held:.2%}, give sparsity={1 - held:g}; to train dense, give Compression.none"
        )
    elif config.algorithm == "dgc" and not adaptive and not {"steps", "sparsity"}.intersection(given):
        warn_once(
            f"neither steps= nor sparsity= was given, so each step sends {1 - held:.1%} of the entries, and a short "
            "training ends far behind a dense one: give Compression.dgc(steps=N), which chooses a density for a "
            f"training of N optimizer steps, or sparsity={held:g} if this is meant"
        )


def warn_of_first_moment(optimizer: str, beta1: object, momentum: float | None) -> None:
    """Warn if both the compressor and the optimizer smooth gradients. This is no error: a user may want it."""
    if not momentum or not isinstance(beta1, (int, float)) or not beta1 > 0:
        return
    warnings.warn(
        f"the compressor has momentum={momentum}, and {optimizer} smooths what comes out of it once more, by "
        f"beta1={beta1}: leave momentum out of the compressor, which then takes the first moment over; or give it "
        "momentum=0 for plain error feedback",
        RuntimeWarning,
        stacklevel=3,
    )


def warn_of_unmatched(option: str, patterns: Iterable[str], names: Sequence[str], what: str) -> None:
    """Warn about patterns that match no name."""
    nothing = [f"{option}={p!r}" for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if nothing:
        warn_once(f"no {what} fits {', '.join(nothing)}; names are {', '.join(names[:4])}, ...")


@functools.cache
def warn_once(text: str) -> None:
    """Warn, but only once in a process about each text."""
    warnings.warn(text, RuntimeWarning, stacklevel=4)

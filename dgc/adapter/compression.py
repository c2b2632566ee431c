"""``Compression``, the same in all frameworks, and what the wrappers refuse."""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from dgc.adapter.compressor import CompressorBase
from dgc.adapter.job import Horovod
from dgc.core.compressors import compressor_class, compressor_names
from dgc.core.config import (
    DGCConfig,
    brief,
    no_compressor,
    plain,
    require_compressor,
    require_integer,
    require_number,
)
from dgc.errors import ConfigError

Constructor = TypeVar("Constructor", bound=Callable[..., Any])


class CompressionBase(abc.ABC):
    """What ``compression=`` takes: Horovod's ``none`` and ``fp16``, and a constructor for each compressor of ours."""

    def __init__(self, horovod: Horovod) -> None:
        """Serve one framework."""
        self._horovod = horovod

    @property
    def none(self) -> Any:
        """Horovod's: gradients are sent as they are."""
        return self._horovod.module(initialized=False).Compression.none

    @property
    def fp16(self) -> Any:
        """Horovod's: gradients are sent as float16."""
        return self._horovod.module(initialized=False).Compression.fp16

    @abc.abstractmethod
    def dgc(self, parameters: Any = None, /, optimizer: Any = None, **options: Any) -> Any:
        """Deep Gradient Compression: send the largest accumulated entries, keep the rest for later.

        With options alone a wrapper binds the rest; for stock Horovod's wrappers give the tensors and the
        optimizer (all ranks together).

        Args:
            parameters: the tensors to compress.
            optimizer: whose tensors are compressed, and whose options are taken over.
            **options: ``momentum, nesterov, weight_decay`` (None: see ``optimizer``; 0 if there is none to adopt),
                ``momentum_masking=None`` (None: True, but with ``steps`` True before an adaptive optimizer alone),
                ``sparsity=0.999`` (a number or a list walked through during ramp-up),
                ``rampup_begin_step=0``, ``rampup_step=1``, ``steps=None`` (of the whole training: they
                choose the sparsity for it), ``local_grad_clip_norm=None``, ``clip_scope="tensor"``,
                ``min_numel=1024``, ``include=()``, ``exclude=()``, ``indices="elias_fano"``, ``values="int2"``,
                ``small="int3"`` (the value codec of tensors that are 1-D or small; "float32": exact),
                ``bucket_bytes=25 MiB``, ``transport="auto"``, ``loss_scale=1.0`` (a number, a function or the
                framework's loss scaler), ``op=Average``, ``process_set=None``, ``seed=0``,
                ``sparse_updates=True`` (False: always make dense results; see ``describe()["updates"]``),
                ``hierarchical=False`` (True: ranks of one node add their gradients up
                first and send as one; "auto": where that saves traffic; a number: groups of so many neighbouring
                ranks. Needs MPI).

        Raises:
            TypeError: an unknown option; the message lists the valid ones.
            ConfigError: an option out of range, momentum applied twice, or Horovod not initialised.
            LayoutError: ranks disagree about the tensors.

        Source: Lin et al. 2018, arXiv 1712.01887.
        """

    @abc.abstractmethod
    def _make(self, *args: Any, **options: Any) -> Any:
        """Make a compressor from (algorithm, tensors, optimizer) and options."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """``Compression.<name>(...)`` of every other compressor, with the arguments of :meth:`dgc` and its own options.

        Raises:
            AttributeError: there is no such compressor; the message lists those there are.
        """
        return constructor(name, self, self._make)

    def __dir__(self) -> list[str]:
        return ["none", "fp16", *compressor_names()]


def constructor(name: str, owner: object, make: Callable[..., Any]) -> Callable[..., Any]:
    """What ``Compression.<name>`` is: ``make`` with the compressor's name as its first argument, and a help text.

    Args:
        name: the attribute that was asked for.
        owner: whose attribute, for the error.
        make: builds a framework's compressor from an algorithm's name, what it is bound to, and options.

    Raises:
        AttributeError: there is no such compressor; the message lists those there are.
    """
    try:
        row = compressor_class(name)
    except ConfigError:
        known = ", ".join(("none", "fp16", *compressor_names()))
        raise AttributeError(f"Compression has no {name!r}; it has {known}", name=name, obj=owner) from None

    @functools.wraps(make)
    def build(*args: Any, **options: Any) -> Any:
        return make(name, *args, **options)

    own = "\n".join(f"    {f.name}={f.default!r}" for f in dataclasses.fields(row.Options))
    build.__name__ = build.__qualname__ = name
    # That of ``make`` without what the constructor's name says already.
    shown = [p for p in inspect.signature(make).parameters.values() if p.name != "algorithm"]
    vars(build)["__signature__"] = inspect.Signature(shown)
    build.__doc__ = (
        f"{row.__doc__}\n\nOptions of its own:\n{own or '    none'}\n\nOptions it shares with other compressors:\n"
        f"    {', '.join(row.common_options())}, transport, loss_scale, process_set\n"
    )
    return refused_uncalled(build)


def refused_uncalled(build: Constructor) -> Constructor:
    """Let a constructor that Horovod's own wrapper got without parentheses say so in the first step."""

    def compress(*_: object) -> NoReturn:
        raise no_compressor(build)

    vars(build)["compress"] = compress
    return build


def checked_tensors(value: object, algorithm: str, name: str, advice: str) -> list[Any]:
    """The list of what a compressor is given to compress.

    Args:
        value: the argument.
        algorithm: the compressor's name, for the error.
        name: the argument's.
        advice: what to pass.

    Raises:
        ConfigError: it is no list of anything, or an empty one.
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
    """Refuse tensors without the optimizer whose options the compressor would adopt.

    Args:
        optimizer: the argument of this name.
        config: the compressor's options.
        given: the name of the argument that came alone.
    """
    if optimizer is None and config.momentum is None:
        raise ConfigError(
            f"Compression.{config.algorithm}({given}) also needs optimizer=, to take its momentum over; pass it, or "
            "momentum=0 for plain error feedback"
        )


def check_compression(compression: object, own: type[CompressorBase[Any]], package: str, **texts: Any) -> None:
    """Refuse what cannot be a compressor for this framework, and a compressor in the place of another argument.

    Args:
        compression: the argument of this name.
        own: the framework's compressors.
        package: where to take one from.
        texts: other arguments, which are texts.
    """
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise ConfigError(
                f"{name} is {brief(value)}; it takes a text. Pass the compressor by its name: compression=..."
            )
    require_compressor(compression)
    if isinstance(compression, type) and issubclass(compression, CompressorBase):
        raise no_compressor(compression)
    if isinstance(compression, CompressorBase) and not isinstance(compression, own):
        raise ConfigError(f"the compressor is one of another framework; take it from {package}.Compression")


def refuse_grouping(num_groups: object, groups: object) -> None:
    """``groups`` is Horovod's way to send several gradients together; the core has its own.

    Raises:
        ConfigError: one of them is set.
    """
    if num_groups or groups is not None:
        raise ConfigError(
            "groups and num_groups have no meaning here: the compressor forms its own buckets; leave them out "
            "(bucket_bytes= of the compressor sets their size)"
        )


def refuse_adasum(op: object, horovod: Horovod) -> None:
    """Adasum needs whole gradients.

    Raises:
        ConfigError: ``op`` is Adasum.
    """
    if op is not None and not isinstance(op, str) and op == horovod.module(initialized=False).Adasum:
        raise ConfigError("op=Adasum cannot be combined with gradient compression; use op=hvd.Average")


def check_passes(passes: object) -> None:
    """Look at ``backward_passes_per_step``.

    Raises:
        ConfigError: it is no whole number >= 1.
    """
    require_integer("backward_passes_per_step", plain(passes), 1)


def check_predivide(factor: object, op_name: str) -> None:
    """Look at ``gradient_predivide_factor``; with a compressor it has no effect, which divides once, in float32.

    Args:
        factor: the argument.
        op_name: "average" or "sum".

    Raises:
        ConfigError: it is no number > 0, or another one than 1 where nothing is divided.
    """
    require_number("gradient_predivide_factor", factor, low=0.0, low_open=True)
    if factor != 1.0 and op_name == "sum":
        raise ConfigError("gradient_predivide_factor needs op=hvd.Average: a sum is not divided; leave it out")


def warn_of_thin_updates(optimizer: str, config: DGCConfig) -> None:
    """Say that an adaptive optimizer learns less from so few entries; call it on one rank."""
    if config.is_thin:
        warnings.warn(
            f"{optimizer} divides by a mean of squares, which few entries distort: where "
            f"{1 - config.sparsity[-1]:.2%} of them are sent it learns far less than in dense training. Give "
            "Compression.dgc(steps=N), N being the optimizer's steps in the whole training, which chooses a density "
            "for it",
            RuntimeWarning,
            stacklevel=4,
        )


def warn_of_first_moment(optimizer: str, beta1: object, momentum: float | None) -> None:
    """Say that gradients are smoothed twice, where they are: no error, since somebody may want that.

    Args:
        optimizer: name of the class, for the message.
        beta1: of the optimizer; whatever is no positive number has no first moment.
        momentum: that the compressor was given; None or 0 if it has none of its own.
    """
    if not momentum or not isinstance(beta1, (int, float)) or not beta1 > 0:
        return
    warnings.warn(
        f"the compressor has momentum={momentum}, and {optimizer} smooths what comes out of it once more, by "
        f"beta1={beta1}: leave momentum out of the compressor, which then takes the first moment over; or give it "
        "momentum=0 for plain error feedback",
        RuntimeWarning,
        stacklevel=3,
    )

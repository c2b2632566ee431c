"""``Compression``, the same in all frameworks, and what the wrappers refuse."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from dgc.adapter.compressor import CompressorBase
from dgc.adapter.job import Horovod, told
from dgc.adapter.signatures import Compressor, Constructors, Optimizer, Tensors, refused_uncalled
from dgc.core.checks import brief, no_compressor, plain, require_compressor, require_integer, require_number
from dgc.core.compressors import compressor_class, compressor_names
from dgc.core.config import DGCConfig
from dgc.errors import ConfigError


class Uncompressed:
    """Dense training: gradients are sent as they are ("none"), or as float16 ("fp16").

    Horovod's compressor of this name, which is looked up where Horovod is used; without Horovod, what dgc's own
    optimizer for ``torch.distributed`` does.
    """

    def __init__(self, name: Literal["none", "fp16"], horovod: Horovod) -> None:
        """Need no Horovod yet."""
        self.name = name
        self._horovod = horovod

    @property
    def horovods(self) -> Any:
        """Horovod's own."""
        return getattr(self._horovod.module(initialized=False).Compression, self.name)

    def compress(self, tensor: Any) -> Any:
        """What Horovod's own returns: the tensor to send, and the context for :meth:`decompress`."""
        return self.horovods.compress(tensor)

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """What Horovod's own returns: the tensor in its own type."""
        return self.horovods.decompress(tensor, ctx)

    def __repr__(self) -> str:
        return f"Compression.{self.name}"


def horovods(compression: Any) -> Any:
    """What Horovod's own wrappers are given: its own compressor in place of ours of the same name, or None."""
    return compression.horovods if isinstance(compression, Uncompressed) else compression


class CompressionBase(Constructors[Tensors, Optimizer, Compressor]):
    """What ``compression=`` takes: ``none`` and ``fp16``, as Horovod has them, and a constructor for each compressor.

    Compressors that others have registered have one as well, with the arguments of ``dgc`` and options of their own.

    Attributes:
        none: gradients are sent as they are.
        fp16: gradients are sent as float16.
    """

    def __init__(self, horovod: Horovod) -> None:
        """Serve one framework."""
        self._horovod = horovod
        self.none, self.fp16 = Uncompressed("none", horovod), Uncompressed("fp16", horovod)

    def _make(
        self, algorithm: str, parameters: Tensors | None = None, optimizer: Optimizer | None = None, **options: Any
    ) -> Compressor:
        """Make a compressor from (algorithm, tensors, optimizer) and options."""
        raise NotImplementedError

    def _told(self, tensors: object, options: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Inside, a constructor looks at its arguments: see :func:`dgc.adapter.job.told`.

        Without ``tensors`` it binds nothing, so that the other ranks do not wait for this one.
        """
        if tensors is None:
            return contextlib.nullcontext()
        return told(self._horovod, options.get("process_set"), transport=options.get("transport", "auto"))

    def from_dict(self, options: Mapping[str, Any]) -> Compressor | Uncompressed:
        """Make what a file of settings names: ``{"name": "dgc", "sparsity": 0.999}``.

        Args:
            options: the constructor under "name", and its options. Numbers, true, false and null may be texts, as YAML
                reads ``1e-4``.

        Raises:
            TypeError: an unknown option; the message lists the valid ones.
            ConfigError: no name, an unknown one, or an option out of range.
        """
        if not isinstance(options, Mapping):
            raise ConfigError(
                f'options are {brief(options)}; give a mapping such as {{"name": "dgc", "sparsity": 0.999}}'
            )
        given = {key: value if key in ("include", "exclude") else read(value) for key, value in options.items()}
        name = given.pop("name", "")
        if name in ("none", "fp16"):
            if given:
                raise TypeError(f"Compression.{name} has no options, and got {', '.join(given)}")
            uncompressed: Uncompressed = getattr(self, name)
            return uncompressed
        compressor_class(name)
        made: Compressor = getattr(self, name)(**given)
        return made

    if not TYPE_CHECKING:  # a type checker knows the names that are not there

        def __getattr__(self, name: str) -> Callable[..., Any]:
            return constructor(name, self, self._make)

    def __dir__(self) -> list[str]:
        return ["none", "fp16", "from_dict", *compressor_names()]


_WORDS = {"true": True, "false": False, "null": None}


def read(value: Any) -> Any:
    """A number, true, false or null that is given as a text, also inside a list; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [read(each) for each in value]
    if not isinstance(value, str) or value.lower() in _WORDS:
        return _WORDS[value.lower()] if isinstance(value, str) else value
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def constructor(name: str, owner: object, make: Callable[..., Any]) -> Callable[..., Any]:
    """What the attribute ``name`` of ``owner`` is for a registered compressor: ``make`` with it as first argument."""
    try:
        row = compressor_class(name)
    except ConfigError:
        known = ", ".join(("none", "fp16", *compressor_names()))
        raise AttributeError(f"Compression has no {name!r}; it has {known}", name=name, obj=owner) from None

    @functools.wraps(make)
    def build(*args: Any, **options: Any) -> Any:
        return make(name, *args, **options)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = row.__doc__
    # That of ``make`` without what the constructor's name says already.
    shown = [p for p in inspect.signature(make).parameters.values() if p.name != "algorithm"]
    vars(build)["__signature__"] = inspect.Signature(shown)
    return refused_uncalled(build)


def checked_tensors(value: object, algorithm: str, name: str, advice: str) -> list[Any]:
    """The list of what a compressor is given to compress; the others are words of the errors."""
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
    """Refuse tensors, which the argument ``given`` holds, without the optimizer that the compressor would adopt of."""
    if optimizer is None and config.momentum is None:
        raise ConfigError(
            f"Compression.{config.algorithm}({given}) also needs optimizer=, to take its momentum over; pass it, or "
            "momentum=0 for plain error feedback"
        )


def check_compression(compression: object, own: type[CompressorBase[Any]], package: str, **texts: Any) -> None:
    """Refuse what cannot be a compressor for this framework, and a compressor in the place of a text."""
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
    """``groups`` is Horovod's way to send several gradients together; the core has its own."""
    if num_groups or groups is not None:
        raise ConfigError(
            "groups and num_groups have no meaning here: the compressor forms its own buckets; leave them out "
            "(bucket_bytes= of the compressor sets their size)"
        )


def refuse_adasum(op: object, horovod: Horovod) -> None:
    """Adasum needs whole gradients."""
    if op is not None and not isinstance(op, str) and op == horovod.module(initialized=False).Adasum:
        raise ConfigError("op=Adasum cannot be combined with gradient compression; use op=hvd.Average")


def check_passes(passes: object) -> None:
    """Look at ``backward_passes_per_step``."""
    require_integer("backward_passes_per_step", plain(passes), 1)


def check_predivide(factor: object, op_name: str) -> None:
    """Look at ``gradient_predivide_factor``; with a compressor it has no effect, which divides once, in float32."""
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
    """Say that gradients are smoothed twice, where they are: no error, since somebody may want that."""
    if not momentum or not isinstance(beta1, (int, float)) or not beta1 > 0:
        return
    warnings.warn(
        f"the compressor has momentum={momentum}, and {optimizer} smooths what comes out of it once more, by "
        f"beta1={beta1}: leave momentum out of the compressor, which then takes the first moment over; or give it "
        "momentum=0 for plain error feedback",
        RuntimeWarning,
        stacklevel=3,
    )

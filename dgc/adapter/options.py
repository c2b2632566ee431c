"""What the constructors of ``Compression`` take beside the core's options, and how a declared constructor is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeVar, cast

from dgc.core.checks import no_compressor

if TYPE_CHECKING:
    from dgc.adapter.job import ProcessSet
    from dgc.core.collectives import Transport

Tensors = TypeVar("Tensors")
Optimizer = TypeVar("Optimizer")
Compressor = TypeVar("Compressor")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class AdapterOptions:
    """Options that concern one rank's surroundings, not the mathematics that all ranks must share."""

    # What carries the messages; "auto" takes MPI where Horovod runs on it, else Horovod or torch.distributed.
    transport: Literal["auto", "mpi", "horovod", "torch.distributed"] | Transport = "auto"
    # By what the loss is multiplied: a number, a function that returns it, or the framework's loss scaler.
    loss_scale: Any = 1.0
    # Horovod's process set of the ranks that exchange; None: all ranks.
    process_set: ProcessSet | None = None


class SupportsCompress(Protocol):
    """What ``compression=`` takes: a compressor of this package, or one of Horovod's."""

    def compress(self, tensor: Any) -> Any:
        """Return what is sent, and what :meth:`decompress` needs."""

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the gradient."""


# Horovod's own compressors are classes, which are not called.
Compressing = SupportsCompress | type[SupportsCompress] | None


def refused_uncalled(make: Function) -> Function:
    """Let a constructor that Horovod's own wrapper got without parentheses say so in the first step."""

    def compress(*_: object) -> NoReturn:
        raise no_compressor(make)

    vars(make)["compress"] = compress
    return make


def by_name(function: Function) -> Function:
    """Make a declared constructor call ``_make`` with its own name and the arguments given, without defaults."""

    @functools.wraps(function)
    def make(self: Any, *args: Any, **options: Any) -> Any:
        return self._make(function.__name__, *args, **options)

    return cast("Function", refused_uncalled(make))

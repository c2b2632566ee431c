"""The options of ``Compression``'s constructors that only adapters need, and how a declared constructor is called."""

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
    """Options that only adapters use. ``DGCConfig`` has those of the core."""

    # The library that carries the messages; "auto" takes MPI if Horovod runs on MPI, else Horovod or torch.distributed.
    transport: Literal["auto", "mpi", "horovod", "torch.distributed"] | Transport = "auto"
    # The factor of the loss: a number, a function that returns it, or the framework's loss scaler.
    loss_scale: Any = 1.0
    # The Horovod process set whose ranks exchange; None: all ranks.
    process_set: ProcessSet | None = None


class SupportsCompress(Protocol):
    """The interface of a value of ``compression=``: a compressor of this package, or one of Horovod's."""

    def compress(self, tensor: Any) -> Any:
        """Return the tensor to send, and a context for :meth:`decompress`."""

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the gradient."""


# Horovod's own compressors are classes that are passed without being called.
Compressing = SupportsCompress | type[SupportsCompress] | None


def refused_uncalled(make: Function) -> Function:
    """Give a constructor a ``compress`` that raises an error, for scripts that pass it without parentheses."""

    def compress(*_: object) -> NoReturn:
        raise no_compressor(make)

    vars(make)["compress"] = compress
    return make


def by_name(function: Function) -> Function:
    """Make a declared constructor call ``_make`` with its own name and only the arguments that were given."""

    @functools.wraps(function)
    def make(self: Any, *args: Any, **options: Any) -> Any:
        return self._make(function.__name__, *args, **options)

    return cast("Function", refused_uncalled(make))

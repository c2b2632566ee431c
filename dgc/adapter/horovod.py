"""Horovod as both adapters use it: its module, small questions to all ranks, process sets and reduce ops."""

from __future__ import annotations

import abc
import atexit
import ctypes
import itertools
import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np

from dgc.core.config import brief
from dgc.core.transport import Collectives, Transport, as_transport
from dgc.errors import ConfigError
from dgc.transport.choice import CHOICES, ProcessSet, choose_transport

JOINED = (
    "a rank has joined (hvd.join) or skips steps while others still train; give every rank the same number of batches "
    "(repeat or drop some) instead of calling hvd.join(), or call dgc.torch.join(compression) in its place (PyTorch)"
)

SHUT_DOWN = (
    "Horovod was shut down: train before hvd.shutdown(), and build optimizer and compressor anew after another "
    "hvd.init()"
)

_instances = itertools.count()
"""Numbers what uses tensor names in this process, so that two of them never use the same one at the same time."""


class Ranks(Protocol):
    """Who exchanges: Horovod's process sets, or another library's groups of ranks."""

    def require_ready(self) -> object: ...  # noqa: D102

    def op_name(self, op: object) -> str: ...  # noqa: D102

    def chosen_set(self, own: ProcessSet | None = None, other: ProcessSet | None = None) -> Any: ...  # noqa: D102

    def member_set(self, process_set: ProcessSet | None = None) -> Any: ...  # noqa: D102


class Horovod(abc.ABC):
    """One framework's Horovod. An adapter makes one object of it.

    Attributes:
        framework: as users call it.
        module_name: what is imported.
        package: the adapter's, for errors.
        elastic: whether constructors may meet the other ranks of an elastic job now: all of them are at the same place.
    """

    elastic = False
    framework: ClassVar[str]
    module_name: ClassVar[str]
    package: ClassVar[str]

    # -- the framework's half ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def load(self) -> ModuleType:
        """Import it.

        Raises:
            ImportError: it is missing, or was built for another version; whatever the framework itself raises then.
        """

    @abc.abstractmethod
    def gather_bytes(self, message: np.ndarray, name: str, process_set: ProcessSet) -> np.ndarray:
        """The members' (m_r,) uint8 messages joined in rank order. Collective.

        Raises:
            TransportError: Horovod's collective failed.
        """

    # -- the module ----------------------------------------------------------------------------------------------

    def module(self, initialized: bool = True) -> ModuleType:
        """Import Horovod.

        Args:
            initialized: also require that ``hvd.init()`` has been called.

        Raises:
            ConfigError: it is missing, was built without or for another version of the framework, or is not
                initialised.
        """
        hint = f"Build Horovod for the installed {self.framework} with: python -m dgc build-horovod --install"
        try:
            hvd = self.load()
        except ImportError as error:
            raise ConfigError(
                f"{self.package} needs Horovod, and importing {self.module_name} failed: {error}. {hint}"
            ) from error
        if not hasattr(hvd, "allreduce"):
            # horovod.torch imports without its extension, prints a warning and has no collectives.
            raise ConfigError(f"Horovod is installed, but was built without {self.framework}. {hint}")
        if initialized and not hvd.is_initialized():
            raise ConfigError(f"Horovod is not initialised: call hvd.init() before anything of {self.package}")
        return hvd

    def require_ready(self) -> ModuleType:
        """The module, in a job that can neither grow nor shrink: every constructor that meets other ranks begins here.

        Raises:
            ConfigError: as :meth:`module`, or Horovod is elastic.
        """
        hvd = self.module()
        if os.environ.get("HOROVOD_ELASTIC") == "1" and not self.elastic:
            raise ConfigError(
                "in a job of elastic Horovod the ranks may be at different places: give model, plain optimizer and "
                "compressor to dgc.torch.elastic.TorchState (PyTorch), or start a fixed number of processes"
            )
        _let_children_end(hvd)
        return hvd

    # -- who takes part ------------------------------------------------------------------------------------------

    def chosen_set(self, own: ProcessSet | None = None, other: ProcessSet | None = None) -> ProcessSet:
        """The process set that a compressor or its wrapper names; all ranks when neither does (None).

        Raises:
            ConfigError: they name two different ones, or something else than a process set.
        """
        for given in (own, other):
            _require_set(given)
        if own is not None and other is not None and not same_set(own, other):
            raise ConfigError("the compressor and the optimizer name different process sets; give it in one place")
        named = own if own is not None else other
        chosen: ProcessSet = self.module(initialized=False).global_process_set if named is None else named
        return chosen

    def member_set(self, process_set: ProcessSet | None = None) -> ProcessSet:
        """The Horovod process set to use, with this process in it.

        Args:
            process_set: a ``hvd.ProcessSet``, or None for all ranks.

        Raises:
            ConfigError: Horovod is not ready, does not know the set, or this process is not in it.
        """
        hvd = self.module()
        _require_set(process_set)
        chosen: ProcessSet = hvd.global_process_set if process_set is None else process_set
        if chosen.process_set_id is None:
            raise ConfigError(
                f"Horovod does not know {chosen}: give it to hvd.init(process_sets=[...]) or hvd.add_process_set(...)"
            )
        if chosen.process_set_id != 0 and chosen.included() is False:
            raise ConfigError(f"rank {hvd.rank()} is not in {chosen}: only its members exchange gradients through it")
        return chosen

    def is_alone(self, process_set: ProcessSet | None = None) -> bool | None:
        """Whether this process exchanges nothing: one rank, or outside the set; None before ``hvd.init()``.

        Raises:
            ConfigError: Horovod is missing, or it is no process set.
        """
        hvd = self.module(initialized=False)
        _require_set(process_set)
        if not hvd.is_initialized():
            return None
        chosen = hvd.global_process_set if process_set is None else process_set
        return not chosen.included() or chosen.size() == 1

    # -- talking -------------------------------------------------------------------------------------------------

    def gather_values(self, value: object, question: str, process_set: ProcessSet) -> list[Any]:
        """Ask all ranks of ``process_set`` for a small value. Collective, on Horovod's own channel.

        Args:
            value: what this rank answers; JSON must know it.
            question: names the collective; the same on all ranks, and not asked twice at the same time.
            process_set: as returned by :meth:`member_set`.

        Returns:
            Every rank's value in rank order.

        Raises:
            TransportError: Horovod's collective failed.
        """
        # One line per rank: Horovod joins arrays of different lengths, and JSON has no line ends of its own.
        line = np.frombuffer((json.dumps(value) + "\n").encode(), np.uint8).copy()
        lines = self.gather_bytes(line, f"dgc.{process_set.process_set_id}.{question}", process_set)
        return [json.loads(text) for text in lines.tobytes().decode().splitlines()]

    def unique_name(self, prefix: str, process_set: ProcessSet) -> str:
        """A beginning of tensor names that nothing else of the job uses. Collective over ``process_set``.

        Raises:
            TransportError: Horovod's collective failed.
        """
        # A rank may have met others in other process sets before; the largest number is new to all members.
        numbers = self.gather_values(next(_instances), f"{prefix}.number", process_set)
        return f"{prefix}.{process_set.process_set_id}.{max(numbers)}"

    def make_transport(
        self, choice: str | Collectives, process_set: ProcessSet | None, make_own: Callable[[ProcessSet], Transport]
    ) -> Transport:
        """Make the transport for a group of ranks. Collective over the ranks of ``process_set``.

        Args:
            choice: "auto", "mpi", "horovod": see :func:`dgc.transport.choice.choose_transport`. Or a transport, to be
                used as it is (then on every rank).
            process_set: a ``hvd.ProcessSet``, or None for all ranks.
            make_own: makes a transport of Horovod's own collectives from a process set.

        Raises:
            ConfigError: unknown or differing choices, Horovod is not ready, or this process is not in ``process_set``.
            TransportError: "mpi" was asked for and some rank cannot use it.
        """
        if not isinstance(choice, str):
            # Needs no Horovod, so that a test can bring ranks of its own.
            if isinstance(choice, Collectives):
                return as_transport(choice)
            raise ConfigError(f"transport must be one of {', '.join(CHOICES)} or a Transport, got {choice!r}")
        return choose_transport(choice, self.module(), self.member_set(process_set), self.gather_values, make_own)

    # -- reduce ops ----------------------------------------------------------------------------------------------

    def op_name(self, op: object) -> str:
        """Horovod's reduce op, or its name, as the core calls it.

        Raises:
            ConfigError: neither Average nor Sum.
        """
        if isinstance(op, str):
            return op.lower()
        hvd = self.module(initialized=False)
        if op == hvd.Average:
            return "average"
        if op == hvd.Sum:
            return "sum"
        raise ConfigError(f"op is {op!r}; gradient compression supports hvd.Average and hvd.Sum (not Adasum)")

    def reduce_op(self, op: object) -> object:
        """Horovod's constant for "average" or "sum"; anything but a text as it is.

        Raises:
            ConfigError: another text.
        """
        if not isinstance(op, str):
            return op
        hvd = self.module(initialized=False)
        known = {"average": hvd.Average, "sum": hvd.Sum}
        if op.lower() not in known:
            raise ConfigError(f"op is {op!r}; allowed: hvd.Average and hvd.Sum, or their names")
        return known[op.lower()]


def _require_set(process_set: object) -> None:
    """Refuse what is neither None nor a ``hvd.ProcessSet``; a number, say, or a list of ranks."""
    if process_set is not None and not hasattr(process_set, "process_set_id"):
        raise ConfigError(
            f"process_set is {brief(process_set)}; give a hvd.ProcessSet, such as hvd.add_process_set([0, 1]) returns"
        )


_children_end: set[str] = set()


def _let_children_end(hvd: ModuleType) -> None:
    """Take out of forked children what would wait for, or take away, what only their parent has.

    That is Horovod's exit handler, which joins a thread, and C++ destructors of what lives as long as a process: those
    of Gloo take the parent's sockets out of the set that the kernel watches for both.
    """
    init = getattr(hvd, "init", None)
    basics = getattr(init, "__self__", None) or getattr(
        sys.modules.get(getattr(init, "__module__", "")), "_basics", None
    )
    handler = getattr(basics, "shutdown", None)
    if handler is not None and hvd.__name__ not in _children_end and hasattr(os, "register_at_fork"):
        if not _children_end and (end := _plain_end()) is not None:
            os.register_at_fork(after_in_child=end)
        _children_end.add(hvd.__name__)
        os.register_at_fork(after_in_child=lambda: atexit.unregister(handler))


def _plain_end() -> Callable[[], None] | None:
    """What a child calls to end without destructors of its parent's; None where the C library has no ``on_exit``.

    Handlers of ``exit()`` run last in, first out, destructors among them. So what is there at the fork comes after
    what the child registers: closing the C library's files, as ``exit()`` does at its very end, and ``_exit()``. Both
    are functions of C, since no Python is left by then; they ignore what a handler is given beyond their arguments.
    """
    try:
        libc = ctypes.CDLL(None)
        register, functions = libc.on_exit, (libc._exit, libc.fcloseall)
    except (AttributeError, OSError, TypeError):
        return None
    register.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    addresses = [ctypes.cast(function, ctypes.c_void_p) for function in functions]

    def end() -> None:
        for address in addresses:  # the last one runs first
            register(address, None)

    return end


def same_set(one: ProcessSet | None, other: ProcessSet | None) -> bool:
    """Whether two process sets are the same; Horovod gives every set that it knows a number."""
    if one is None or other is None:
        return one is other
    return one is other or (one.process_set_id is not None and one.process_set_id == other.process_set_id)


def check_placeholder(value: float, *, op: str, size: int) -> None:
    """Look at what Horovod made of a 1.0 from every rank: it betrays another op, and ranks that have joined.

    Args:
        value: the reduced placeholder.
        op: "average" or "sum", the compressor's.
        size: number of ranks.

    Raises:
        ConfigError: Horovod does something else than the compressor.
    """
    expected = float(size) if op == "sum" else 1.0
    if abs(value - expected) < 1e-3:
        return
    if op == "average" and abs(value - size) < 1e-3:
        raise ConfigError(
            "Horovod sums the gradients (op=hvd.Sum) but the compressor averages; pass the same op to both: "
            "Compression.dgc(..., op=hvd.Sum)"
        )
    if op == "sum" and abs(value - 1.0) < 1e-3:
        raise ConfigError("the compressor has op=Sum but Horovod averages the gradients; pass op=hvd.Sum to both")
    raise ConfigError(
        f"the ranks' placeholders reduced to {value:g} instead of {expected:g}: a rank has joined (hvd.join), or the "
        "op is not one the compressor supports; give every rank the same number of batches (repeat or drop some) "
        "instead of hvd.join(), or call dgc.torch.join(compression) in its place (PyTorch)"
    )

"""The ranks that exchange with each other, and the parts of Horovod that both adapters use."""

from __future__ import annotations

import abc
import contextlib
import copy
import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from typing_extensions import override

from dgc.adapter.agreement import tell_error
from dgc.adapter.transport_choice import CHOICES, choose_transport, tell_no_choice
from dgc.core.checks import brief
from dgc.core.collectives import Collectives, Transport, as_transport
from dgc.errors import ConfigError, TransportError

JOINED = (
    "a rank has joined (hvd.join) or skips steps while others still train; give every rank the same number of batches "
    "(repeat or drop some), or call join(compression) of dgc.torch or dgc.tensorflow, not hvd.join()"
)

SHUT_DOWN = (
    "Horovod was shut down: train before hvd.shutdown(), and build optimizer and compressor anew after another "
    "hvd.init()"
)

Own = TypeVar("Own", bound="Horovod")

_instances = itertools.count()  # each unique_name() gets the next number


class ProcessSet(Protocol):
    """The methods of Horovod's process set that are used here. They return None if this process is not in the set."""

    process_set_id: int | None
    ranks: Any

    def included(self) -> bool | None:
        """Return whether this process is in the set."""

    def rank(self) -> int:
        """Return this process' place in the set."""

    def size(self) -> int:
        """Return the number of ranks."""


class Job(abc.ABC):
    """The ranks that exchange with each other: a Horovod process set, or a torch.distributed process group."""

    @property
    @abc.abstractmethod
    def members(self) -> Any:
        """The library's object for these ranks: a ``hvd.ProcessSet``, or a process group."""

    @property
    @abc.abstractmethod
    def included(self) -> bool:
        """Whether this process is one of these ranks."""

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """This process' place among these ranks."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @abc.abstractmethod
    def require_ready(self) -> object:
        """Require that the library is initialised. Every constructor that communicates calls this first."""

    @abc.abstractmethod
    def of(self, process_set: Any = None, other: Any = None) -> Job:
        """Return the ranks of ``process_set`` (a compressor's) or ``other`` (its wrapper's); without both, these."""

    @abc.abstractmethod
    def op_name(self, op: object) -> str:
        """Return "average" or "sum" for one of the library's reduce ops or its name."""

    @abc.abstractmethod
    def gather(self, value: object, question: str) -> list[Any]:
        """Return every rank's small value, in rank order. Collective."""

    @abc.abstractmethod
    def make_transport(self, choice: str | Collectives = "auto") -> Transport:
        """Make the transport among the ranks. Collective.

        Args:
            choice: a name from :data:`dgc.adapter.transport_choice.CHOICES`; or a transport, on every rank.
        """

    @abc.abstractmethod
    def tell(self, error: Exception) -> None:
        """Send an error to the ranks that wait in :meth:`make_transport`. Collective."""


_SILENCE = 5.0  # seconds to wait for the other ranks before an error meant for them is printed on this rank


@contextlib.contextmanager
def errors_on_all_ranks(job: Job, *sets: Any, transport: object = "auto") -> Iterator[None]:
    """Raise an error from the ``with`` block on all ranks of the job.

    The other ranks may already be waiting in :meth:`Job.make_transport`.

    The error stays on this rank if Horovod is not initialised, or if ``sets``, the arguments of :meth:`Job.of`, hold
    two different process sets: then nobody knows which ranks wait.
    """
    try:
        yield
    except Exception as error:
        if isinstance(transport, Collectives):
            tell_error(as_transport(transport), error)
            raise
        try:
            job = job.of(*sets)
        except ConfigError:
            if any(hasattr(given, "process_set_id") for given in sets):
                raise error from None
        said = f"this rank waits for the others to tell them: {error}"
        waiting = threading.Timer(_SILENCE, print, [said], {"file": sys.stderr})
        with contextlib.suppress(ConfigError, TransportError):
            job.require_ready()
            if job.included and job.size > 1:
                waiting.start()
                job.tell(error)
        waiting.cancel()
        raise


class Horovod(Job):
    """One framework's Horovod, and the ranks of one of its process sets. Each adapter makes one object for all ranks.

    Attributes:
        framework: the framework's name, for errors.
        module_name: the module that is imported.
        package: the adapter's name, for errors.
        process_set: the process set of these ranks; None for all ranks.
        elastic: whether all ranks of an elastic job have reached the same point, so that constructors may communicate.
    """

    framework: ClassVar[str]
    module_name: ClassVar[str]
    package: ClassVar[str]
    process_set: ProcessSet | None = None
    elastic = False

    # -- the framework's half ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def load(self) -> ModuleType:
        """Import Horovod's module."""

    @abc.abstractmethod
    def gather_bytes(self, message: np.ndarray, name: str) -> np.ndarray:
        """Return the ranks' (m_r,) uint8 messages, joined in rank order. Collective."""

    @abc.abstractmethod
    def own_transport(self) -> Transport:
        """Make a transport that uses Horovod's own collectives. Collective."""

    # -- the module ----------------------------------------------------------------------------------------------

    def module(self, initialized: bool = True) -> ModuleType:
        """Return Horovod's module; raise an error if it cannot be imported or, by default, is not initialised."""
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

    @override
    def require_ready(self) -> ModuleType:
        hvd = self.module()
        if os.environ.get("HOROVOD_ELASTIC") == "1" and not self.elastic:
            raise ConfigError(
                "in a job of elastic Horovod the ranks may be at different places: give model, plain optimizer and "
                "compressor to dgc.torch.elastic.TorchState (PyTorch), or start a fixed number of processes"
            )
        return hvd

    # -- the ranks -----------------------------------------------------------------------------------------------

    @property
    @override
    def members(self) -> ProcessSet:
        given = self.process_set
        chosen: ProcessSet = self.module(initialized=False).global_process_set if given is None else given
        return chosen

    @property
    @override
    def included(self) -> bool:
        return bool(self.members.included())

    @property
    @override
    def rank(self) -> int:
        return self.members.rank()

    @property
    @override
    def size(self) -> int:
        return self.members.size()

    @override
    def of(self: Own, process_set: ProcessSet | None = None, other: ProcessSet | None = None) -> Own:
        for given in (process_set, other):
            if given is not None and not hasattr(given, "process_set_id"):
                raise ConfigError(
                    f"process_set is {brief(given)}; give a hvd.ProcessSet, such as hvd.add_process_set([0, 1]) returns"
                )
        if process_set is not None and other is not None and not same_set(process_set, other):
            raise ConfigError("the compressor and the optimizer name different process sets; give it in one place")
        named = other if process_set is None else process_set
        if named is None or named is self.process_set:
            return self
        job = copy.copy(self)
        job.process_set = named
        return job

    def require_member(self) -> ProcessSet:
        """Return the process set; raise an error if this process is not in it."""
        hvd, members = self.module(), self.members
        if members.process_set_id is None:
            raise ConfigError(
                f"Horovod does not know {members}: give it to hvd.init(process_sets=[...]) or hvd.add_process_set(...)"
            )
        if members.process_set_id != 0 and members.included() is False:
            raise ConfigError(f"rank {hvd.rank()} is not in {members}: only its members exchange gradients through it")
        return members

    def is_alone(self, process_set: ProcessSet | None = None) -> bool | None:
        """Return whether this process exchanges nothing: it is the only rank, or not in the set.

        Return None before ``hvd.init()``.
        """
        job = self.of(process_set)
        if not self.module(initialized=False).is_initialized():
            return None
        return not job.included or job.size == 1

    # -- talking -------------------------------------------------------------------------------------------------

    @override
    def gather(self, value: object, question: str) -> list[Any]:
        # Send one line per rank: Horovod joins arrays of different lengths, and JSON texts contain no line ends.
        line = np.frombuffer((json.dumps(value) + "\n").encode(), np.uint8).copy()
        lines = self.gather_bytes(line, f"dgc.{self.members.process_set_id}.{question}")
        return [json.loads(text) for text in lines.tobytes().decode().splitlines()]

    def unique_name(self, prefix: str) -> str:
        """Return a prefix of tensor names that nothing else in the job uses. Collective."""
        # A member that is also in other process sets may have counted further. The largest number is new to all.
        numbers = self.gather(next(_instances), f"{prefix}.number")
        return f"{prefix}.{self.members.process_set_id}.{max(numbers)}"

    @override
    def make_transport(self, choice: str | Collectives = "auto") -> Transport:
        if not isinstance(choice, str):
            # This works without Horovod, so that a test can use its own ranks.
            if isinstance(choice, Collectives):
                return as_transport(choice)
            with errors_on_all_ranks(self):
                raise ConfigError(f"transport must be one of {', '.join(CHOICES)} or a Transport, got {choice!r}")
        self.require_member()
        return choose_transport(choice, self.module(), self.gather, self.own_transport)

    @override
    def tell(self, error: Exception) -> None:
        self.require_member()
        tell_no_choice(error, self.module().rank(), self.gather)

    # -- reduce ops ----------------------------------------------------------------------------------------------

    @override
    def op_name(self, op: object) -> str:
        if isinstance(op, str):
            return op.lower()
        hvd = self.module(initialized=False)
        if op in (hvd.Average, hvd.Sum):
            return "average" if op == hvd.Average else "sum"
        given = "Adasum" if op == hvd.Adasum else brief(op)
        raise ConfigError(f"op={given} cannot be combined with gradient compression; use hvd.Average or hvd.Sum")

    def reduce_op(self, op: object) -> object:
        """Return Horovod's constant for "average" or "sum"; return other values unchanged."""
        if not isinstance(op, str):
            return op
        hvd = self.module(initialized=False)
        known = {"average": hvd.Average, "sum": hvd.Sum}
        if op.lower() not in known:
            raise ConfigError(f"op is {op!r}; allowed: hvd.Average and hvd.Sum, or their names")
        return known[op.lower()]


def same_set(one: ProcessSet | None, other: ProcessSet | None) -> bool:
    """Return whether two process sets are the same. Horovod gives each set a number."""
    if one is None or other is None:
        return one is other
    return one is other or (one.process_set_id is not None and one.process_set_id == other.process_set_id)


def check_placeholder(value: float, *, op: str, size: int) -> None:
    """Check the sum or mean that Horovod made of a 1.0 from every rank. It reveals a wrong op and joined ranks."""
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
        f"the ranks' placeholders reduced to {value:g} instead of {expected:g}: {JOINED}; or the op is not one that "
        "the compressor supports"
    )

"""``Compression`` and the compressors that it makes: their options, how they are bound, their state and statistics."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from dgc.adapter.agreement import agree_or_raise
from dgc.adapter.checks import check_predivide
from dgc.adapter.engine import CONNECTED, NO_EXCHANGE, EngineBase, Observer, warn_of_dropped
from dgc.adapter.job import Horovod, Job, ProcessSet, errors_on_all_ranks, same_set
from dgc.adapter.options import AdapterOptions, Compressor, Optimizer, Tensors, refused_uncalled
from dgc.adapter.signatures import Constructors
from dgc.core.checks import as_loss_scale, brief, no_compressor, require_compressor
from dgc.core.collectives import Transport
from dgc.core.compressors import compressor_class, compressor_names, make_config
from dgc.core.config import DGCConfig
from dgc.core.exchange.exchange import LossScale
from dgc.core.exchange.stats import Stats
from dgc.core.saved import EMPTY, INACTIVE, digest, is_empty, require_state
from dgc.errors import ConfigError, LayoutError

EngineT = TypeVar("EngineT", bound=EngineBase)


class CompressorBase(Generic[EngineT]):
    """One compressor: its options, the model that it is bound to, and its state. Each framework has a subclass.

    Attributes:
        config: the validated options.
        engine: the model's engine; None before ``bind``, with one process, and outside the process set.
        is_bound: whether the compressor belongs to a model already.
        generation: counts resets and loads. Gradients that were accumulated in an earlier generation are forgotten.
    """

    _job: Job

    def __init__(self, options: dict[str, Any], algorithm: str = "dgc") -> None:
        """Check the options for the compressor that ``algorithm`` names. The tensors are given to ``bind``."""
        self.given_options = dict(options)
        options = dict(options)
        names = [field.name for field in dataclasses.fields(AdapterOptions)]
        self._adapter = AdapterOptions(**{name: options.pop(name) for name in names if name in options})
        self._op_was_given = "op" in options
        options["op"] = self._job.op_name(options.get("op", "average"))
        try:
            self.config: DGCConfig = make_config(options, algorithm=algorithm)
        except TypeError as error:
            raise TypeError(f"{error}, {', '.join(names)}") from None
        self._loss_scale = self._read_loss_scale(self._adapter.loss_scale)
        self.engine: EngineT | None = None
        self._observers: list[Observer] = []
        self.is_bound, self.generation = False, 0
        self._pending: Mapping[str, Any] | None = None

    def _read_loss_scale(self, value: object) -> LossScale:
        """Return the option ``loss_scale`` in the core's form. Adapters also accept their framework's loss scalers."""
        return as_loss_scale(value)

    def use_op(self, op: object, gradient_predivide_factor: object = 1.0) -> str:
        """Set the reduce op to that of the wrapper, unless the wrapper gives None; return the op's name."""
        name = self.config.op if op is None else self._job.op_name(op)
        check_predivide(gradient_predivide_factor, name)
        if name != self.config.op:
            if self._op_was_given or self.is_bound:
                raise ConfigError(
                    f"the compressor has op={self.config.op}, the optimizer op={name}; pass the same to both, or "
                    "leave it out of the compressor"
                )
            self.config = dataclasses.replace(self.config, op=name)
        return name

    # -- binding -------------------------------------------------------------------------------------------------

    @property
    def takes_part(self) -> bool:
        """Whether this process is in the process set. True before ``bind``, and in a job of one process."""
        return not self.is_bound or self._job.included

    def process_set(self, other: ProcessSet | None = None) -> Any:
        """Return the process set that exchanges: the option ``process_set``, else ``other``, else all ranks."""
        return self.job(other).members

    def job(self, process_set: ProcessSet | None = None) -> Job:
        """Return the ranks of :meth:`process_set`."""
        return self._job.of(self._adapter.process_set, process_set)

    def needs_engine(self, job: Job) -> bool:
        """Return whether this process exchanges gradients with the ranks of ``job``.

        A subclass that applies the momentum itself, even in one process, may return True.
        """
        return job.included and job.size > 1

    def errors_on_all_ranks(self, process_set: ProcessSet | None = None) -> contextlib.AbstractContextManager[None]:
        """Raise an error of the ``with`` block on all ranks, because the others may be waiting in ``bind``."""
        own = self._adapter
        return errors_on_all_ranks(self._job, own.process_set, process_set, transport=own.transport)

    def _bind(
        self,
        process_set: ProcessSet | None,
        open_engine: Callable[[Transport], EngineT],
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        """Do the part of ``bind`` that all frameworks share. Collective over the process set.

        If it raises, everything is undone, so that a script can call ``bind`` again.
        """
        assert not self.is_bound
        transport: Transport | None = None
        choice = self._adapter.transport
        try:
            self._job.require_ready()
            job = self.job(process_set)
            if self.needs_engine(job):
                transport = job.make_transport(choice)
                self.engine = open_engine(transport)
                self.engine.observers = self._observers
                # A state must have been loaded on all ranks, or on none.
                advice = "Load the same state on every rank, or none."
                given = {"step": "none loaded" if self._pending is None else "one loaded"}
                agree_or_raise(transport, lambda: given, "states", LayoutError, advice)
                if self._pending is not None:
                    self._load(self._pending, advice)
                self._pending = None
            elif self._pending is not None:
                state, self._pending = self._pending, None
                if job.included:
                    warn_of_dropped(state)
        except BaseException:
            if self.engine is not None:
                self.engine.close(keep_transport=True)
                self.engine = None
            if transport is not None and isinstance(choice, str):  # otherwise the transport belongs to the user
                transport.close()
            undo()
            raise
        self._job = job
        self.is_bound = True

    def _exchanging(self, missing: str) -> EngineT | None:
        """Return the engine for a call by Horovod; None in a job of one process."""
        if self.engine is None and not self.is_bound:
            raise ConfigError(f"Compression.{self.config.algorithm}(...) was given no {missing}")
        return self.engine

    def require_same_set(self, theirs: ProcessSet | None) -> None:
        """Require that Horovod's own wrapper uses the same process set as the compressor."""
        if not same_set(theirs, self.process_set()):
            raise ConfigError(
                "Horovod's wrapper was given another process set than the compressor; pass the same one to both: "
                "Compression.dgc(..., process_set=...)"
            )

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Bytes sent and received, dense bytes, ratio, density and seconds, for the latest step and in total."""
        return self.engine.stats if self.engine is not None else Stats()

    def on_step(self, observer: Observer) -> Observer:
        """Call a function with the figures of each step on this rank. It can be used as a decorator.

        Args:
            observer: called with a dictionary of this rank's figures: "step" (its number, from 0), "refused",
                "bytes_sent", "bytes_received", "dense_bytes", "small_bytes", "ratio", "density", and "seconds" (by
                phase). It is called after the exchange and before the update. If it raises an error, the error is
                logged, and the observer is not called again.

        Returns:
            ``observer``.
        """
        self._observers.append(observer)
        return observer

    @property
    def residual_norm(self) -> float:
        """The L2 norm of the gradients that this rank has not sent yet."""
        return self.engine.residual_norm() if self.engine is not None else 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle: all but the observers. A bound compressor raises an error."""
        if self.engine is not None:
            raise TypeError(CONNECTED)
        return {**self.__dict__, "_observers": []}

    def describe(self) -> dict[str, Any]:
        """Describe the compressor for a log: its step, density, ramp-up, buckets, exchange, transport and more.

        The dictionary is empty before the compressor is bound.
        """
        return self.engine.describe() if self.engine is not None else dict(NO_EXCHANGE) if self.is_bound else {}

    def average(self, optimizer: Any = None) -> None:
        """Make the model equal on all ranks, and what belongs to ``optimizer`` if it is given. Collective.

        Before you evaluate the model, call it without the optimizer. Before you save a checkpoint, call it with the
        optimizer: its state and the compressor's become equal on all ranks, too, and one rank can save them. Residuals
        and momentum are replaced by their means. With classic error feedback the model is always equal.

        Raises:
            LayoutError: it was called in the middle of a step, or after a step that failed.
            ConfigError: another rank makes a step.
        """
        if self.engine is not None:
            self.engine.require_open("average()")
            self.engine.average(optimizer)

    def state_dict(self, own: bool = False) -> dict[str, Any]:
        """Return the compressor's state for a checkpoint: residuals, momentum buffers, step.

        Call :meth:`average` with the optimizer on all ranks before, and save the state of one rank. Any number of ranks
        can load it. Before the compressor is bound, this is the loaded state, or an empty one.

        Args:
            own: return this rank's state, also if it differs from that of other ranks.

        Raises:
            LayoutError: the ranks may differ; or it was called in the middle of a step, or after a step that failed; or
                this rank is not in the process set.
        """
        if self.engine is not None:
            return self.engine.state_dict(own)
        if not self.takes_part:
            raise LayoutError("this rank is not in the compressor's process set: save the state of a rank that is")
        return dict(INACTIVE) if self.is_bound else copy.deepcopy(dict(self._pending or EMPTY))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; call it on all ranks, with the same state.

        A compressor that is bound to no model keeps the state and loads it when it is bound. An empty state, from a
        compressor that had not exchanged anything, resets this one. So does one of a job of one process.

        Args:
            state: the result of :meth:`state_dict`, from a job of any number of ranks.

        Raises:
            LayoutError: on some rank, the state is damaged or belongs to another model or op; or the ranks' states
                differ. No rank's present state is changed.

        Warns:
            RuntimeWarning: this process exchanges nothing, so it drops residuals and momentum.
        """
        if self.engine is not None:
            self.engine.require_open("load_state_dict()")
            self.engine.abandon()  # an unfinished step would use the transport
            self._load(state, "Load the same state on every rank.")
            self.generation += 1
            return
        self.fitting_state(state)
        if not self.is_bound:
            self._pending = state
        elif self.takes_part:
            warn_of_dropped(state)

    def fitting_state(self, state: Any) -> Mapping[str, Any]:
        """Check that :meth:`load_state_dict` will accept a state on this rank. Change nothing. Not collective.

        Returns:
            The state to load; {} resets.
        """
        require_state(state)
        if is_empty(state):
            return {}
        if self.engine is not None:
            self.engine.require_loadable(state)
        found: Mapping[str, Any] = state
        return found

    def _load(self, state: object, advice: str) -> None:
        """Load a state on all ranks or on none: all ranks check their states before any of them changes anything."""
        engine, found = self.engine, {}
        assert engine is not None

        def look() -> dict[str, Any]:
            found["state"] = new = self.fitting_state(state)
            return {"step": new.get("step", 0), "empty": not new, "checksum": digest(new)}

        def change() -> dict[str, Any]:
            engine.load_state_dict(found["state"])
            return {}

        agree_or_raise(engine.transport, look, "states", LayoutError, advice)
        agree_or_raise(engine.transport, change, "results of loading the states", LayoutError)

    def reset(self) -> None:
        """Forget residuals, momentum buffers, the step and the statistics. Call it on all ranks."""
        self._pending = None
        self.generation += 1
        if self.engine is not None:
            self.engine.reset()

    def close(self) -> None:
        """End the communication threads, and forget the functions of :meth:`on_step`, which may hold open files."""
        if self.engine is not None:
            self.engine.close()
        self._observers.clear()


class Uncompressed:
    """The values ``none`` and ``fp16`` of ``compression=``: gradients are sent unchanged, or as float16.

    Horovod's own wrappers get Horovod's compressor of the same name. Horovod is imported only then, because dgc's
    optimizer for ``torch.distributed`` does not need it.
    """

    def __init__(self, name: Literal["none", "fp16"], horovod: Horovod) -> None:
        self.name = name
        self._horovod = horovod

    @property
    def horovods(self) -> Any:
        """Horovod's compressor of this name."""
        return getattr(self._horovod.module(initialized=False).Compression, self.name)

    def compress(self, tensor: Any) -> Any:
        """Return the tensor to send, and the context for :meth:`decompress`."""
        return self.horovods.compress(tensor)

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its own type."""
        return self.horovods.decompress(tensor, ctx)

    def __repr__(self) -> str:
        return f"Compression.{self.name}"


def horovods(compression: Any) -> Any:
    """Return the compression for Horovod's own wrappers: Horovod's ``none`` and ``fp16`` in place of dgc's."""
    return compression.horovods if isinstance(compression, Uncompressed) else compression


class CompressionBase(Constructors[Tensors, Optimizer, Compressor]):
    """The values of ``compression=``: ``none`` and ``fp16``, as in Horovod, and a constructor for each compressor.

    A compressor that a user registers also gets a constructor. It has the arguments of ``dgc`` and its own options.

    Attributes:
        none: send gradients unchanged.
        fp16: send gradients as float16.
    """

    def __init__(self, horovod: Horovod) -> None:
        self._horovod = horovod
        self.none, self.fp16 = Uncompressed("none", horovod), Uncompressed("fp16", horovod)

    def _make(
        self, algorithm: str, parameters: Tensors | None = None, optimizer: Optimizer | None = None, **options: Any
    ) -> Compressor:
        """Make the framework's compressor."""
        raise NotImplementedError

    def _errors_on_all_ranks(
        self, tensors: object, options: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Raise an error of the ``with`` block on all ranks.

        Without ``tensors`` no rank is waiting, so there is none to notify.
        """
        if tensors is None:
            return contextlib.nullcontext()
        return errors_on_all_ranks(
            self._horovod, options.get("process_set"), transport=options.get("transport", "auto")
        )

    def from_dict(self, options: Mapping[str, Any]) -> Compressor | Uncompressed:
        """Make the compressor that a file of settings describes: ``{"name": "dgc", "sparsity": 0.999}``.

        Args:
            options: the name of the constructor under "name", and its options. Numbers, true, false and null may be
                strings, because YAML reads ``1e-4`` as a string.

        Raises:
            TypeError: an option is unknown; the message lists the valid ones.
            ConfigError: the name is missing or unknown, or an option is out of range.
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

    if not TYPE_CHECKING:  # otherwise a type checker would accept any name

        def __getattr__(self, name: str) -> Callable[..., Any]:
            return constructor(name, self, self._make)

    def __dir__(self) -> list[str]:
        return ["none", "fp16", "from_dict", *compressor_names()]


_WORDS = {"true": True, "false": False, "null": None}


def read(value: Any) -> Any:
    """Turn strings into numbers, True, False and None, even inside a list; return other values unchanged."""
    if isinstance(value, (list, tuple)):
        return [read(each) for each in value]
    if not isinstance(value, str) or value.lower() in _WORDS:
        return _WORDS[value.lower()] if isinstance(value, str) else value
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def constructor(name: str, owner: object, make: Callable[..., Any]) -> Callable[..., Any]:
    """Return the constructor of a compressor, which calls ``make(name, ...)``."""
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
    # The signature of ``make`` without ``algorithm``, which is the constructor's name.
    shown = [p for p in inspect.signature(make).parameters.values() if p.name != "algorithm"]
    vars(build)["__signature__"] = inspect.Signature(shown)
    return refused_uncalled(build)


def check_compression(compression: object, own: type[CompressorBase[Any]], package: str, **texts: Any) -> None:
    """Refuse a ``compression`` that is not a compressor for this framework, and ``texts`` that are not strings."""
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise ConfigError(
                f"{name} is {brief(value)}; it takes a text. Pass the compressor by its name: compression=..."
            )
    require_compressor(compression)
    if isinstance(compression, type) and issubclass(compression, CompressorBase):
        raise no_compressor(compression)
    if isinstance(compression, CompressorBase) and not isinstance(compression, own):
        raise ConfigError(f"the compressor belongs to another framework; take it from {package}.Compression")

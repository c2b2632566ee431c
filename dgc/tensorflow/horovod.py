"""Horovod for TensorFlow: its module, a transport over its collectives, and support for its own tape and optimizers.

The last part is for Horovod's own tape and optimizers. They call ``compress``, Horovod's allreduce and ``decompress``
for each variable. ``groups=1`` is required, so that all calls of ``compress`` come before the first ``decompress``,
which exchanges the gradients of all variables. ``compress`` gets a gradient without its variable. So it searches the
Python frames above it for Horovod's lists of variables and gradients. No other file of this adapter reads frames.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf
from typing_extensions import override

from dgc.adapter.agreement import gather_if_different
from dgc.adapter.compressor import CompressorBase
from dgc.adapter.job import SHUT_DOWN, Horovod, check_placeholder
from dgc.core.checks import no_compressor
from dgc.core.collectives import Transport, gather_values
from dgc.errors import ConfigError, LayoutError, TransportError
from dgc.tensorflow.adoption import KERAS3, Adoption, family
from dgc.tensorflow.engine import Engine
from dgc.tensorflow.tensors import Step, Variable, cross, raw_variable, still_there, unique_names
from dgc.transport.framework import FrameworkTransport

if TYPE_CHECKING:
    from horovod.tensorflow import ProcessSet as ProcessSet
else:
    ProcessSet = object
ReduceOp: TypeAlias = "int | str"  # Horovod's constant, or its name

NEVER_AVERAGES = (
    "Horovod's DistributedOptimizer does not average gradients under Keras 3, and does not say so: every rank would "
    "train its own model. Use dgc.tensorflow.keras.DistributedOptimizer(optimizer, compression=...), or set "
    "TF_USE_LEGACY_KERAS=1 and use tf_keras"
)


class TensorFlowHorovod(Horovod):
    """Horovod for TensorFlow."""

    framework = "TensorFlow"
    module_name = "horovod.tensorflow"
    package = "dgc.tensorflow"

    @override
    def load(self) -> ModuleType:
        try:
            import horovod.tensorflow as hvd
        except tf.errors.NotFoundError as error:
            raise ImportError(str(error)) from error
        return hvd

    def gather_bytes(self, message: np.ndarray, name: str) -> np.ndarray:
        """Join the members' messages in rank order, even while a TensorFlow function is being traced."""
        return _collective(
            f"gather {message.size} bytes ({name})", self.module().allgather, message, name, self.members
        )

    @override
    def own_transport(self) -> Transport:
        return HorovodTransport(self)


def _collective(
    what: str, function: Callable[..., tf.Tensor], array: np.ndarray, name: str, process_set: ProcessSet, **options: Any
) -> np.ndarray:
    """Run one of Horovod's collectives eagerly, even while a graph is being built, and return its result."""
    # Run it on the CPU, because a build with NCCL must not move bytes to a GPU. init_scope leaves the unfinished graph.
    with tf.init_scope(), tf.device("/cpu:0"):
        try:
            given = tf.constant(array)
            return np.asarray(function(given, name=name, process_set=process_set, ignore_name_scope=True, **options))
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            raise TransportError(f"Horovod could not {what}: {error}") from error


HOROVOD = TensorFlowHorovod()
import_horovod = HOROVOD.module
is_alone = HOROVOD.is_alone


class HorovodTransport(FrameworkTransport):
    """A transport over the collectives of ``horovod.tensorflow``, called as eager operations.

    An eager operation runs on the calling thread. So it needs no thread of TensorFlow's pool, whose threads may all be
    waiting for this exchange. One call takes about 3 ms; most of this is Horovod's cycle time.
    """

    name, shut_down = "horovod", SHUT_DOWN

    def __init__(self, job: TensorFlowHorovod = HOROVOD) -> None:
        """Agree on names. Collective over the job's ranks."""
        self._job, self._hvd = job, job.module()
        self._process_set = job.require_member()
        self._prefix = job.unique_name("dgc.transport")
        super().__init__(job.rank, job.size)

    def _gather(self, message: np.ndarray) -> np.ndarray:
        return self._job.gather_bytes(message, f"{self._prefix}.allgather.{message.size}")

    def _deal(self, message: np.ndarray) -> np.ndarray:
        name = f"{self._prefix}.alltoall.{message.size}"
        return _collective(f"deal {message.size} bytes", self._hvd.alltoall, message, name, self._process_set)

    def _sum(self, array: np.ndarray) -> None:
        name = f"{self._prefix}.allreduce.{array.dtype.name}.{array.size}"
        members, op = self._process_set, self._hvd.Sum
        total = _collective(f"sum {array.size} elements", self._hvd.allreduce, array, name, members, op=op)
        np.copyto(array, total)

    def _is_running(self) -> bool:
        return self._hvd.is_initialized()


def gather_slices(slices: tf.IndexedSlices, name: str, process_set: ProcessSet, *, is_sum: bool) -> tf.IndexedSlices:
    """Return all ranks' slices, divided by the number of ranks unless ``is_sum``.

    Horovod's allreduce does the same, but it uses Keras' names, which may differ between ranks.
    """
    hvd = import_horovod()
    options = {"process_set": process_set, "ignore_name_scope": True}
    kind = slices.values.dtype
    given = tf.cast(slices.values, tf.float32) if kind == tf.bfloat16 else slices.values  # Horovod has no such kernel
    values = hvd.allgather(given, name=f"{name}.values", **options)
    indices = hvd.allgather(slices.indices, name=f"{name}.indices", **options)
    if not is_sum:
        values = values / tf.cast(process_set.size(), values.dtype)
    return tf.IndexedSlices(tf.cast(values, kind), indices, slices.dense_shape)


def broadcast_in_order(variables: Sequence[tf.Variable], root_rank: int, process_set: ProcessSet | None) -> None:
    """Overwrite variables with the values of rank ``root_rank``. Collective.

    Variables are matched by their place in the list, because Keras' names contain counters that may differ.
    """
    hvd, job = import_horovod(), HOROVOD.of(process_set)
    process_set, raws = job.members, [raw_variable(v) for v in variables]
    _require_alike(HorovodTransport(job), unique_names(variables), [f"{tuple(v.shape)} {v.dtype.name}" for v in raws])
    for place, variable in enumerate(raws):
        value = tf.convert_to_tensor(variable)
        kind = tf.float32 if value.dtype == tf.bfloat16 else value.dtype  # Horovod cannot broadcast bfloat16
        name = f"dgc.broadcast.{place}"
        sent = hvd.broadcast(tf.cast(value, kind), root_rank, name=name, process_set=process_set)
        variable.assign(tf.cast(sent, value.dtype))


def _require_alike(transport: Transport, names: Sequence[str], shapes: Sequence[str]) -> None:
    """Raise the same error on every rank unless all ranks have variables of the same shapes and types. Collective."""
    if gather_if_different(transport, {"shapes": list(shapes)}) is None:
        return
    ranks = gather_values(transport, list(zip(shapes, names, strict=True)))
    for place, (first, *others) in enumerate(zip_longest(*ranks, fillvalue=("missing", ""))):
        for rank, other in enumerate(others, 1):
            if other[0] != first[0]:
                raise LayoutError(
                    f"the model's and the optimizer's variables differ between ranks: number {place} is {first[1]!r} "
                    f"{first[0]} on rank 0 and {other[1]!r} {other[0]} on rank {rank}. Build the same model and "
                    "optimizer on every rank, and load a saved one on all ranks or on none"
                )


# This many values of a variable are compared in each step, because Horovod may run a graph for another model whose
# variables have the same shapes.
_PROBED = 16

# Attributes of Horovod's tapes, optimizers and helpers that hold local variables.
_LOCAL = ("_local_sources", "_local_vars")


@dataclass
class Pending:
    """A gradient that was given to ``compress`` and was not returned by ``decompress`` yet."""

    index: int
    gradient: tf.Tensor
    variable: tf.Variable
    result: tf.Tensor | None = None


class HorovodCompressor(CompressorBase[Engine]):
    """The part of a compressor that Horovod's own classes call while they build a graph."""

    adoption: Adoption | None = None  # None before adopt(), and in a job of one process

    _job = HOROVOD
    _user: str | None = None
    _waiting: Sequence[Pending] = ()
    _expected = 0
    _turn: tf.Variable | None = None

    def claim(self, user: str) -> None:
        """Remember the user of this compressor, and refuse a second user.

        A user is a tape, a distributed optimizer, or all of Horovod's own classes together.
        """
        if self._user not in (None, user):
            raise ConfigError(
                f"this compressor is used by {self._user} and by {user} at the same time; gradients would be exchanged "
                "twice: use one of them"
            )
        self._user = user

    @property
    def serves_horovod(self) -> bool:
        """Whether Horovod's own classes have called :meth:`compress`."""
        return self._turn is not None

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: tf.Tensor | None = None) -> tuple[tf.Tensor, Pending | None]:
        """Remember a gradient, and return a placeholder of one element for Horovod to reduce."""
        if tensor is None:  # the script gave Horovod the class instead of a compressor
            raise no_compressor(HorovodCompressor)
        engine = self._exchanging(
            "variables: pass model.trainable_variables of a built model and optimizer=, or use the wrappers of "
            "dgc.tensorflow, which bind them"
        )
        if engine is None:
            return tensor, None  # one process
        if self._turn is None:
            self.claim("Horovod's own classes")
            with tf.init_scope():
                self._turn = tf.Variable(0, trainable=False, dtype=tf.int64, name="dgc_turn")
        variables, gradients, optimizer, process_set, has_local = _horovods_call()
        if process_set is not None:
            self.require_same_set(process_set)
        place = next((i for i, g in enumerate(gradients) if g is tensor), None)
        if place is None:
            raise ConfigError(
                "Horovod passed a gradient, and the compressor cannot find its variable (sparse_as_dense, "
                "op=Adasum or backward_passes_per_step may have copied it); use the wrappers of dgc.tensorflow"
            )
        engine.adoption.follow(optimizer)
        if has_local:
            engine.fail_in_step(
                ConfigError(
                    "Horovod's local variables cannot be combined with a compressor, which has taken the momentum of "
                    "all variables: update them with an optimizer of their own, without register_local_source() and "
                    "register_local_var()"
                )
            )
        indices, _ = engine.begin(variables, gradients, converts=False)
        self._rate = engine.adoption.learning_rate(optimizer)
        earlier = bool(self._waiting) and self._waiting[0].gradient.graph is not tensor.graph
        pending = Pending(indices[place], tensor, raw_variable(variables[place]))
        self._expected = sum(gradient is not None for gradient in gradients)
        self._waiting = [*(() if earlier else self._waiting), pending]  # drop gradients of an unfinished trace
        return tf.ones([1], tf.float32), pending

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: tf.Tensor, ctx: Pending | None) -> tf.Tensor:
        """Return the exchanged gradient for a reduced placeholder. The first call exchanges all variables."""
        if ctx is None:
            return tensor
        if ctx.result is None:
            members, self._waiting = sorted(self._waiting, key=lambda p: p.index), ()
            self._cross(members, tensor)
        assert ctx.result is not None
        return ctx.result

    def __hash__(self) -> int:
        """Hash by identity. Refuse if Horovod does this to build an optimizer that would never exchange gradients."""
        _refuse_horovods_keras3()
        return object.__hash__(self)

    def _cross(self, members: Sequence[Pending], placeholder: tf.Tensor) -> None:
        engine = self.engine
        assert engine is not None, "compress() refuses an unbound compressor"
        assert self._turn is not None
        indices = [m.index for m in members]
        if len(members) < self._expected:
            engine.fail(
                ConfigError(
                    "Horovod hands over the gradients one by one or in several groups: pass groups=1 to its "
                    "DistributedGradientTape or DistributedOptimizer, or use the wrappers of dgc.tensorflow"
                )
            )
        engine.require_members(indices)
        probe = tf.reshape(tf.convert_to_tensor(members[0].variable), [-1])[:_PROBED]
        values = [m.variable for m in members] if any(engine.adoption.hyper.weight_decay) else []
        step = _step_of(self, indices)
        given = [*(m.gradient for m in members), placeholder, tf.cast(probe, tf.float32)]
        # TensorFlow keeps operations in order only if they change the same variable. Without `_turn`, a graph's
        # exchanges could run in a different order on each rank.
        with tf.control_dependencies([self._turn.assign_add(1)]):
            results, _ = cross(step, given, self._rate, values, [m.variable for m in members])
        for member, result in zip(members, results[: len(members)], strict=True):
            member.result = result


def _step_of(compressor: HorovodCompressor, indices: Sequence[int]) -> Step:
    """Return the function that the graph calls in each step.

    The function must not hold the compressor, because TensorFlow never drops the function.
    """
    reference, count = weakref.ref(compressor), len(indices)

    def step(arrays: list[np.ndarray], rate: float | None, values: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
        alive = still_there(reference)
        engine = alive.engine
        assert engine is not None
        *gradients, sum_of_ones, probed = arrays[: count + 2]
        # This raises without engine.fail(): all ranks that still train get the same sum, and a rank in hvd.join()
        # receives no errors.
        check_placeholder(float(sum_of_ones[0]), op=alive.config.op, size=engine.transport.size)
        own = np.asarray(engine.variables[indices[0]]).reshape(-1)[: probed.size].astype(np.float32)
        if not np.array_equal(own, probed, equal_nan=True):
            engine.fail(
                ConfigError(
                    "Horovod runs this compressor for another model, whose variables have the same shapes; residuals "
                    "cannot be shared: build one compressor for each model and optimizer"
                )
            )
        results, verdict = engine.step(indices, gradients, rate, values)
        engine.stats.add_sent(sum_of_ones.nbytes * count)
        # cross() needs a result for each input, so the placeholder and the probe are returned unchanged.
        return [*results, np.asarray(sum_of_ones, np.float32), np.asarray(probed, np.float32)], verdict

    return step


# -- Python frames -------------------------------------------------------------------------------------------------


def _refuse_horovods_keras3() -> None:
    """Refuse Horovod's optimizer for Keras 3, which never exchanges anything and does not say so.

    Horovod hashes the compressor when it builds an optimizer, and never calls it after that. Without the broadcast
    callback, nothing else of ours is called.
    """
    for frame in _frames(10):
        owner = frame.f_locals.get("self")
        if owner is not None and _module(frame) == "horovod._keras" and family(owner) == KERAS3:
            raise ConfigError(NEVER_AVERAGES)


def _horovods_call() -> tuple[list[Variable], list[Any], Any, ProcessSet | None, bool]:
    """Find the arguments of the call inside Horovod in the frames above.

    Returns:
        The variables, their gradients, the optimizer or None, the process set or None, and whether a variable is local.
    """
    pairs = process_set = owner = None
    has_local = False
    for frame in _frames(63):
        found = frame.f_locals
        candidate = found.get("self")
        if process_set is None and _module(frame) == "horovod.tensorflow":
            process_set = found.get("process_set")
        if pairs is None and "allreduce_grads" in frame.f_code.co_name and "vars" in found:
            pairs = list(found["vars"]), list(found["grads"])
        if pairs is not None and owner is None and family(candidate) is not None:
            owner = candidate
        # Look only in Horovod's own code: a script's objects may have attributes of these names.
        if _module(frame).partition(".")[0] == "horovod":
            attributes = getattr(candidate, "__dict__", {})
            has_local = has_local or any(attributes.get(name) for name in _LOCAL)
    if pairs is None:
        raise ConfigError(
            "compress() was not called by hvd.DistributedGradientTape or hvd.DistributedOptimizer; use these, or the "
            "wrappers of dgc.tensorflow"
        )
    return *pairs, owner, process_set, has_local


def _frames(most: int) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(most):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))

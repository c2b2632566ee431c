"""The engine of the TensorFlow adapter: one model's variables on one rank, and the core's exchange of them.

A variable's index is its place among the variables that the compressor was built for.
"""

from __future__ import annotations

import dataclasses
import glob
import math
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from typing_extensions import override

from dgc.adapter.agreement import require_agreement, require_replicas, tell_error
from dgc.adapter.checks import warn_of_unmatched
from dgc.adapter.engine import EngineBase
from dgc.adapter.warm_up import compiled
from dgc.core.collectives import Transport
from dgc.core.config import DGCConfig
from dgc.core.exchange.exchange import Exchange, LossScale
from dgc.core.exchange.step import StepOptions
from dgc.core.kernels import choose_kernels
from dgc.core.layout import Layout, make_layout
from dgc.core.message import Disagreement, Flags
from dgc.errors import ConfigError, DGCError, LayoutError
from dgc.tensorflow.adoption import Adoption
from dgc.tensorflow.tensors import (
    APPLY,
    REFUSED,
    ResultPool,
    Variable,
    as_array,
    common_names,
    describe,
    largest_finite,
    raw_variable,
    samples,
    unique_names,
    warn_of_copies,
)

_BYTES = 12  # bytes of one element's gradient, momentum and residual in float32
DENSE, NONE = "dense", "none"  # the kinds of gradient that a variable may have


class Engine(EngineBase):
    """Variables, adopted momentum, and the exchange of one compressor. Construction is collective.

    Attributes:
        variables: the variables that the compressor was built for, in registration order.
        kinds: DENSE or NONE for each variable's gradient; None before the first step.
        members: indices of the variables that are exchanged, which had gradients in the first step; empty before it.
        exchange: the core's exchange of the members, in their order; missing before the first step.
        rate: u is Keras' velocity divided by ``-rate``, the learning rate; None if no velocity was taken.
    """

    what = "variables"
    advice = (
        "Build the same model and optimizer on every rank. Keras numbers models and layers in the order of their "
        "creation: create the same ones on every rank, or give them names."
    )
    adoption: Adoption
    exchange: Exchange

    def __init__(
        self,
        variables: Sequence[Variable],
        config: DGCConfig,
        transport: Transport,
        adoption: Adoption,
        loss_scale: LossScale,
        lacks_residuals: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        """Agree with the other ranks. ``names`` are the names in a saved model; loading may have renamed variables."""
        super().__init__(config, transport)
        self.variables = [raw_variable(v) for v in variables]
        self.adoption = adoption
        self._loss_scale = loss_scale
        self._lacks_residuals = lacks_residuals
        self._index = {id(v): i for i, v in enumerate(self.variables)}
        self.members: tuple[int, ...] = ()
        self.rate: float | None = None
        self._runs = 0
        self.kinds: tuple[str, ...] | None = None
        self._seen: list[np.ndarray] = []
        self._dense: set[int] = set()
        self._has_loaded = self._has_slots = self._warned_of_sparse = False
        self._left_at = 0

        def build() -> Layout:
            adoption.cover(len(self.variables))
            return self._layout_of(range(len(self.variables)))

        self._agree_on_options()
        own = unique_names(variables)
        names = common_names(transport, names if len(names) == len(own) else own)
        self._resolve_patterns(names, common_names(transport, own))
        self._call(names)
        self._agree_on_tensors(build)
        warn_of_copies(variables)

    # -- which gradients there are -------------------------------------------------------------------------------

    def indices(self, variables: Sequence[Variable]) -> list[int]:
        """Return the variables' indices; :meth:`fail` if one is not of this model."""
        foreign = next((v for v in variables if id(raw_variable(v)) not in self._index), None)
        if foreign is not None:
            name = getattr(foreign, "path", None) or getattr(foreign, "name", "?")
            wrong = (
                f"{name!r} is not among the variables of the compressor's first step or of its optimizer's bind(); "
                "residuals cannot be shared: build one compressor for each model and optimizer, and a new one when "
                "variables are added"
            )
            self.fail(LayoutError(wrong))
        return [self._index[id(raw_variable(v))] for v in variables]

    def begin(
        self, variables: Sequence[Variable], gradients: Sequence[Any], *, converts: bool = True
    ) -> tuple[list[int], list[Any]]:
        """Begin a step or its graph: take the momentum, and agree with all ranks which variables have gradients.

        Later steps only compare the kinds of gradients with the first step. A dense gradient may be missing, if it is
        missing on all ranks.

        Returns:
            The variables' indices, and the gradients. If ``converts``, sparse gradients have become tensors.
        """
        self.require_open("gradient() or apply_gradients()")
        indices, gradients = self.indices(variables), list(gradients)
        kinds, sparse = [NONE] * len(self.variables), []
        for i, (index, gradient) in enumerate(zip(indices, gradients, strict=True)):
            kinds[index] = NONE if gradient is None else DENSE
            if not isinstance(gradient, tf.IndexedSlices):
                continue
            if not converts:
                wrong = (
                    f"{self.names[index]!r} has sparse gradients (tf.IndexedSlices), which Horovod's wrappers do not "
                    "compress: use those of dgc.tensorflow"
                )
                self.fail_in_step(ConfigError(wrong))
            gradients[i] = tf.convert_to_tensor(gradient)
            sparse.append(index)
        self._warn_of_sparse(sparse)
        self.take_momentum()
        if self.kinds is None:
            require_agreement(
                self.transport,
                dict(zip(self.names, kinds, strict=True)),
                "kinds of gradients",
                LayoutError,
                "Every rank must compute the same loss from the same variables.",
            )
            self.kinds = tuple(kinds)
            if (moment := self.adoption.moment) is not None:
                moment.earlier_steps = self.adoption.steps if moment.earlier_steps is None else moment.earlier_steps
            # Read the number of steps here, because a graph may count the step before it exchanges the gradients.
            self._left_at = 0 if self._exchange is not None and self._exchange.state.step else self.adoption.steps
        still_some = DENSE in kinds or DENSE not in self.kinds
        for name, before, now in zip(self.names, self.kinds, kinds, strict=True):
            if before != now and not (before == DENSE and now == NONE and still_some):
                error = (
                    f"the gradient of {name!r} was {before!r} in the first step and is {now!r} now; the set of "
                    "gradients must not grow or become empty: build a new compressor"
                )
                self.fail(LayoutError(error))
        self._dense = {i for i, kind in enumerate(kinds) if kind == DENSE}
        return indices, gradients

    def _warn_of_sparse(self, indices: Sequence[int]) -> None:
        """Warn once about sparse gradients that are compressed, because their dense form takes memory."""
        sparsified = self.layout.sparsified()
        found = [i for i in indices if sparsified[self.names[i]]]
        if not found or self._warned_of_sparse:
            return
        self._warned_of_sparse = True
        if self.transport.rank == 0:
            elements = sum(math.prod(self.variables[i].shape) for i in found)
            warnings.warn(
                f"{', '.join(repr(self.names[i]) for i in found)}: sparse gradients (tf.IndexedSlices) are compressed "
                f"in their dense form, which takes {_BYTES * elements / 2**20:,.1f} MiB on each rank for gradient, "
                "momentum and residual. sparse_as_dense=True in the wrapper of dgc.tensorflow says that this is meant; "
                "a variable in exclude= is sent dense, without momentum and residual",
                UserWarning,
                stacklevel=2,
            )

    def take_momentum(self) -> None:
        """Take a momentum that the user has assigned since the last step; after a reset, also take the slots."""
        try:
            self.adoption.take()
            if self._has_loaded:
                self._absorb_slots()
            self._has_loaded = False
        except ConfigError as error:
            self.fail_in_step(error)

    def require_members(self, indices: Sequence[int]) -> None:
        """Require that these are all members that have a gradient in this step. The first call makes the exchange."""
        if self._exchange is None:
            self._open_exchange(indices)
            self._absorb_slots()
        elif (given := set(indices)) != {i for i in self.members if i in self._dense or i in given}:
            self.fail(
                LayoutError(
                    f"{self.names[indices[0]]!r} is exchanged together with other variables than in the first step; "
                    "the set of gradients must stay, or build a new compressor"
                )
            )

    def _open_exchange(self, indices: Sequence[int]) -> None:
        """Allocate the state of these variables. All ranks must have agreed on them."""
        self.members, stats = tuple(indices), self.stats
        if self._exchange is not None:
            self._exchange.close()
        layout = self._layout_of(indices)
        kernels = compiled(self._config, lambda: choose_kernels("cpu"), lambda chosen: chosen)
        self._exchange = self.exchange = Exchange(
            layout, self._config, self.between, kernels, loss_scale=self._loss_scale
        )
        self.exchange.stats = stats
        wide = [np.float64 if p.dtype == "float64" else np.float32 for p in layout.parameters]
        self._pool = ResultPool([p.shape for p in layout.parameters], wide)
        self._close_when_dropped()

    def step(
        self,
        indices: Sequence[int],
        gradients: Sequence[np.ndarray],
        learning_rate: float | None,
        parameters: Sequence[np.ndarray],
    ) -> tuple[list[np.ndarray], int]:
        """Exchange one step of these variables; see :meth:`run`."""
        self.require_open("gradient() or apply_gradients()")
        self.take_momentum()  # here and not in begin(), because a new momentum does not cause a graph to be retraced
        if self._left_at:
            self._warn_of_loss()
        follows = self.adoption.taken
        made = self.run(indices, gradients, learning_rate, parameters, follows=follows)
        self._after_step()
        return made

    def run(
        self,
        indices: Sequence[int],
        gradients: Sequence[np.ndarray],
        learning_rate: float | None,
        parameters: Sequence[np.ndarray],
        *,
        follows: bool,
        joins: int = 0,
    ) -> tuple[list[np.ndarray], int]:
        """Exchange one step; return results in the variables' shapes, float32 or float64, and APPLY or REFUSED.

        Args:
            indices: the variables that have a gradient, ascending; the others do not change on any rank.
            gradients: the gradients of these variables.
            learning_rate: the learning rate, which is the same on all ranks.
            parameters: the values of these variables; empty if no weight decay needs them.
            follows: whether the adopted velocity contains the learning rate.
            joins: flags of a rank that takes part without data.
        """
        exchange = self.exchange
        self._follow_moment()
        self._count_run()
        places = {index: place for place, index in enumerate(self.members)}
        given = [places[i] for i in indices]
        absent = sorted(set(places.values()).difference(given))
        hyper = self.adoption.hyper.chosen(self.members, () if learning_rate is None else (learning_rate,))
        hyper.absent = tuple(absent)
        if learning_rate is not None and follows:
            self.follow(learning_rate)
        # Keras adds lr * g to its velocity. At a learning rate of 0, nothing is added, and the results move no
        # variable. So momentum and residuals must not change either.
        before = exchange.state.copy() if learning_rate == 0.0 and follows else None
        for place in absent:
            hyper.weight_decay[place] = 0.0
        try:
            results = self._submit(given, gradients, parameters, StepOptions(hyper, joins=joins))
            refused = exchange.finish()
        except Disagreement as error:
            self._name_difference(error, hyper, "learning_rate")
            raise
        self._require_all_ended()
        if before is not None:
            before.step = exchange.state.step
            exchange.state.assign(before)
        return results, REFUSED if refused else APPLY

    def exchange_nothing(self, flags: int) -> None:
        """Take part in one step of the other ranks, without data."""
        values = []
        if any(self.adoption.hyper.weight_decay):
            values = [np.asarray(self.adoption.decayed(i, self.variables[i])) for i in self.members]
        parameters = self.exchange.layout.parameters
        zeros = [np.zeros(p.shape, np.float64 if p.dtype == "float64" else np.float32) for p in parameters]
        self.run(self.members, zeros, None, values, follows=True, joins=flags)

    def _submit(
        self,
        places: Sequence[int],
        gradients: Sequence[np.ndarray],
        parameters: Sequence[np.ndarray],
        options: StepOptions,
    ) -> list[np.ndarray]:
        """Begin a step of the exchange, and submit the gradients of the members ``places``. Return their results."""
        exchange = self.exchange
        exchange.begin(options)
        for place in set(range(len(self.members))).difference(places):
            nothing = self._pool.take(place).reshape(-1)
            nothing.fill(0)
            exchange.submit(place, nothing, nothing, absent=True)
        results = []
        for number, (place, gradient) in enumerate(zip(places, gradients, strict=True)):
            wanted = exchange.layout.parameters[place]
            if tuple(gradient.shape) != wanted.shape:
                exchange.fail(
                    LayoutError(
                        f"the gradient of {wanted.name!r} is {tuple(gradient.shape)}, the variable was {wanted.shape} "
                        "when the compressor was built; build a new compressor when variables change"
                    ),
                    place,
                )
            result, limit = self._pool.take(place), largest_finite(self.variables[self.members[place]].dtype)
            parameter = as_array(parameters[number]) if parameters else None
            exchange.submit(place, as_array(gradient), result.reshape(-1), parameter, limit)
            results.append(result)
        return results

    def _follow_moment(self) -> None:
        """Set this step's options if the compressor may apply the optimizer's first moment."""
        if (moment := self.adoption.moment) is None:
            return
        first, steps = self.exchange.selects_from, self.exchange.state.step
        selects = first is not None and steps >= first and self.layout.sparse_numel > 0
        moment.begin(self.adoption.hyper, steps, self._scale_momentum, selects=selects)
        if steps == first:
            moment.absorb([self.variables[i] for i in self.members], steps, self._absorb)

    def _require_all_ended(self) -> None:
        """Raise an error on all ranks if only some of them have ended ``fit()``."""
        ended = sorted(rank for rank, flags in self.exchange.joined.items() if flags & Flags.ENDED)
        if 0 < len(ended) < self.between.size:
            self.exchange.joined = {}
            raise ConfigError(
                f"rank {ended[0]} has ended fit() while others still train: give all ranks the same number of batches, "
                "and callbacks such as EarlyStopping the same values on all ranks, by MetricAverageCallback before "
                "them in the list of callbacks"
            )

    def _count_run(self) -> None:
        """Count a step. Compare the optimizer's options before the first step, and the replicas before the second.

        Keras broadcasts an unbuilt model after the first step.
        """
        if self._runs == 0:
            advice = "Give every rank the same options, or load the same model on all ranks."
            options = self.adoption.constant_options()
            require_agreement(self.between.whole, options, "the optimizer's options", advice=advice)
        if self._runs == 1:
            require_replicas(
                self.between.whole,
                {self.names[i]: samples(self.variables[i]) for i in self.members},
                "before the first step call hvd.broadcast_variables(variables, root_rank=0), or add dgc.callbacks."
                "BroadcastGlobalVariablesCallback(0) to the callbacks of fit() (and build the model before it)",
                tolerance=1e-6,  # different processors may round the first step differently
            )
        self._runs += 1

    def _absorb(self, place: int, u: np.ndarray, learning_rate: float | None) -> None:
        """Load a member's u from a dense run. ``learning_rate`` is that of the dense run's velocity, or None."""
        self.exchange.state.absorb_momentum(place, u)
        self.rate = learning_rate

    def _scale_momentum(self, factor: float) -> None:
        for bucket in self.exchange.state.buckets:
            bucket.u *= bucket.u.dtype.type(factor)

    def follow(self, learning_rate: float) -> None:
        """Multiply u by lr_old/lr_new, unless the learning rate is 0 and nothing moves in this step."""
        if self.rate is not None and learning_rate not in (0.0, self.rate):
            self._scale_momentum(self.rate / learning_rate)
        if learning_rate or self.rate is None:
            self.rate = learning_rate

    def fail(self, error: DGCError) -> NoReturn:
        """Raise ``error`` here. If there is an exchange, all other ranks get the text in the same step."""
        if self._exchange is None:
            raise error
        try:
            self._count_run()  # the other ranks do this next
        except DGCError as other:
            raise error from other
        self._exchange.fail(error)

    def fail_in_step(self, error: DGCError) -> NoReturn:
        """Raise ``error`` on all ranks, which are in the same step. Unlike :meth:`fail`, it works in the first step."""
        if self.kinds is None:
            tell_error(self.transport, error)  # the other ranks are in begin()
            raise error
        self.fail(error)

    # -- saving, ending ------------------------------------------------------------------------------------------

    def _extra_state(self) -> dict[str, Any]:
        moment = self.adoption.moment
        earlier = None if moment is None else moment.earlier_steps
        return {"rate": self.rate, "kinds": list(self.kinds or ()), "names": self.names, "earlier_steps": earlier}

    def _take_state(self, saved: Mapping[str, Any]) -> None:
        self._left_at = 0
        saved = self._renamed(saved)
        names = {name: i for i, name in enumerate(self.names)}
        unknown = [name for name in saved["parameters"] if name not in names]
        if unknown:
            raise LayoutError(
                f"the saved compressor state has a variable {unknown[0]!r}, and the model has none of this name: build "
                "the compressor for the model that was saved, or call reset() to begin with empty residuals"
            )
        if self._has_loaded:
            self._absorb_slots()
        self._has_loaded = False  # the optimizer's slots must not replace the loaded state later
        if saved.get("kinds"):
            self.kinds = tuple(saved["kinds"])
        if self.adoption.moment is not None:
            self.adoption.moment.earlier_steps = saved.get("earlier_steps")
        self.require_members(sorted(names[name] for name in saved["parameters"]))
        if self._layout_of(self.members) != self.exchange.layout:
            self._open_exchange(self.members)
        self.exchange.load_state_dict(saved)
        self.rate = saved.get("rate")
        self.layout = self._layout_of(range(len(self.variables)))

    def remember(self) -> None:
        """Remember a few values of every variable for :meth:`was_changed`."""
        self._seen = [samples(v) for v in self.variables]

    def was_changed(self) -> bool:
        """Return whether this rank's variables have changed since :meth:`remember`; forget the remembered values."""
        before, self._seen = self._seen, []
        return any((a != samples(v)).any() for a, v in zip(before, self.variables, strict=False))

    def begin_anew(self, forget: bool) -> None:
        """Continue with variables that were broadcast. Call it on all ranks. ``forget`` makes the state empty."""
        if self._exchange is None:
            return
        if forget:
            for bucket in self._exchange.state.buckets:
                bucket.u.fill(0)
                bucket.v.fill(0)
                bucket.clear_error()
            self._has_loaded, self._has_slots, self._lacks_residuals = True, False, True
            self._left_at = self.adoption.steps
        self._runs = min(self._runs, 1)

    def close(self, keep_transport: bool = False) -> None:
        """End the communication thread and free the memory. Options and statistics stay."""
        super().close(keep_transport)
        self._pool = ResultPool([], [])
        for bucket in self._exchange.state.buckets if self._exchange is not None else ():
            bucket.u, bucket.v = bucket.u[:0].copy(), bucket.v[:0].copy()
            bucket.error, bucket.w = bucket.error[:0].copy(), bucket.w[:0].copy()
            bucket.owned_error = bucket.owned_error[:0].copy()

    @override
    def average(self, optimizer: Any = None) -> None:
        super().average(optimizer)
        if optimizer is not None and self.adoption.moment is not None:
            self.adoption.moment.clear_slots()  # so that this run goes on as one that loads the saved model

    @override
    def state_dict(self, own: bool = False) -> dict[str, Any]:
        if not self.is_open:
            raise LayoutError("the compressor was closed and has no residuals any more: take its state before close()")
        return super().state_dict(own)

    def _clear(self) -> None:
        self._left_at = 0
        if self.adoption.moment is not None:
            self.adoption.moment.earlier_steps = self.adoption.steps
        self.rate = None
        # The script may have loaded another model, whose optimizer has a dense run's slots.
        self._has_loaded = True

    # -- inside --------------------------------------------------------------------------------------------------

    def _layout_of(self, indices: Sequence[int]) -> Layout:
        return make_layout([describe(self.names[i], self.variables[i]) for i in indices], self._config)

    @override
    def require_loadable(self, saved: Mapping[str, Any]) -> None:
        names, layout = self.names, self.layout
        try:
            super().require_loadable(saved)
        finally:
            self._call(names)
            self.layout = layout

    def _renamed(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give the variables their names in the state, because Keras renames a loaded model's variables."""
        names = list(saved.get("names", self.names))
        if names == self.names or len(names) != len(self.names):
            return saved
        sizes = {n: int(np.prod(v.shape)) for n, v in zip(names, self.variables, strict=True)}
        if all(sizes.get(name) == entry["u"].size for name, entry in saved["parameters"].items()):
            self._call(names)
            self.layout = self._layout_of(range(len(self.variables)))
        return saved

    def _resolve_patterns(self, *all_names: Sequence[str]) -> None:
        """Find the variables that the options name, by any of the variables' names. Rank 0 warns if none match."""
        self._named: dict[str, dict[str, set[int]]] = {
            option: {p: {i for names in all_names for i, n in enumerate(names) if fnmatchcase(n, p)} for p in patterns}
            for option, patterns in (("include", self._config.include), ("exclude", self._config.exclude))
        }
        if self.transport.rank == 0:
            known = [name for names in all_names for name in names]
            for option, found in self._named.items():
                warn_of_unmatched(option, found, known, "variable")

    def _call(self, names: Sequence[str]) -> None:
        """Give the variables other names. The options still apply to the same variables."""
        self.names = list(names)
        include, exclude = (
            tuple(glob.escape(names[i]) for i in sorted(set().union(*found.values()))) for found in self._named.values()
        )
        self._config = dataclasses.replace(self._config, include=include, exclude=exclude)

    def _absorb_slots(self) -> None:
        if self._exchange is not None:
            members = [self.variables[i] for i in self.members]
            self._has_slots |= self.adoption.absorb_slots(members, self.variables, self._absorb)

    def _warn_of_loss(self) -> None:
        """Warn about momentum and residuals that are lost if a model was loaded without its compressor's state."""
        steps, self._left_at = self._left_at, 0
        lost = ["momentum"] if any(self.adoption.hyper.momentum) and not self._has_slots else []
        lost += ["what was not sent yet"] if self._lacks_residuals else []
        if lost and self.transport.rank == 0:
            warnings.warn(
                f"the model goes on after {steps} steps, but nothing was loaded into the compressor, which holds "
                f"momentum and residuals: {' and '.join(lost)} is lost. "
                "dgc.tensorflow.keras.callbacks.CompressionCheckpoint keeps both beside a model (place it before "
                "callbacks that save the model); in your own loop call average(optimizer) of the compressor on all "
                "ranks, save its state_dict(), and call load_state_dict() on all ranks",
                RuntimeWarning,
                stacklevel=2,
            )

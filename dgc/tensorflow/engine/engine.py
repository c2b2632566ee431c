"""One model's variables on one rank, bound to exchanges of the core.

Every variable has one index: its place among the variables that the compressor was built for.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from dgc.adapter.engine import EngineBase
from dgc.core.config import DGCConfig
from dgc.core.exchange.exchange import LossScale
from dgc.core.layout import Layout, make_layout
from dgc.core.transport import Transport
from dgc.errors import ConfigError, DGCError, LayoutError
from dgc.tensorflow.engine.adoption import Adoption
from dgc.tensorflow.engine.group import Group
from dgc.tensorflow.engine.horovod import CommonNames
from dgc.tensorflow.engine.numpy_bridge import warn_of_copies
from dgc.tensorflow.engine.tensors import Variable, common_names, describe, raw_variable, samples, unique_names
from dgc.transport.agreement import require_agreement, tell_error

DENSE, SPARSE, NONE = "dense", "IndexedSlices", "none"
"""The kinds of gradient that a variable may have."""


class Engine(EngineBase):
    """Variables, adopted momentum, and the exchanges of one compressor. Construction is collective.

    Attributes:
        variables: those that the compressor was built for, in registration order.
        sparse_names: of the collectives that send sparse gradients.
        groups: of variables that are exchanged together.
        kinds: of each variable's gradient: DENSE, SPARSE or NONE; None before the first step.
    """

    what = "variables"
    advice = (
        "Build the same model and optimizer on every rank. Keras numbers models and layers as they are made: make as "
        "many on every rank, or give them names."
    )
    adoption: Adoption

    def __init__(
        self,
        variables: Sequence[Variable],
        config: DGCConfig,
        transport: Transport,
        adoption: Adoption,
        loss_scale: LossScale,
        lacks_residuals: bool = False,
    ) -> None:
        """Agree with the other ranks.

        Args:
            variables: the model's trainable variables.
            config: the options.
            transport: moves the bytes.
            adoption: momentum, and the optimizer that it was taken from.
            loss_scale: a number, or a function that is called once per step.
            lacks_residuals: the model was loaded, and saved where residuals were not empty.

        Raises:
            DGCError: variables, shapes, types or options differ between ranks, or construction failed on a rank.
        """
        super().__init__(config, transport)
        self.variables = [raw_variable(v) for v in variables]
        self.adoption = adoption
        self._loss_scale = loss_scale
        self._lacks_residuals = lacks_residuals
        self._index = {id(v): i for i, v in enumerate(self.variables)}
        self.groups: list[Group] = []
        self._group_of: dict[int, Group] = {}
        self.kinds: tuple[str, ...] | None = None
        self._seen: list[np.ndarray] = []
        self._has_loaded = self._has_slots = False
        self._left_at = 0
        self.sparse_names = CommonNames("sparse")

        def build() -> Layout:
            adoption.cover(len(self.variables))
            return self._layout_of(range(len(self.variables)))

        self._agree_on_options()
        self.names = common_names(transport, unique_names(variables))
        self._agree_on_tensors(build)
        warn_of_copies(variables)

    # -- which gradients there are -------------------------------------------------------------------------------

    def indices(self, variables: Sequence[Variable]) -> list[int]:
        """Indices of variables.

        Raises:
            LayoutError: the compressor was not built for one of them.
        """
        foreign = next((v for v in variables if id(raw_variable(v)) not in self._index), None)
        if foreign is not None:
            self.fail(foreign_variable(foreign))
        return [self._index[id(raw_variable(v))] for v in variables]

    def begin(self, variables: Sequence[Variable], gradients: Sequence[Any]) -> list[int]:
        """Begin a step or its graph: follow the momentum, and fix with all ranks which variables have gradients.

        After the first step kinds of gradients are only compared with it. Returns the variables' indices.

        Raises:
            LayoutError: a foreign variable; or ranks or steps differ in which variables have gradients, and which kind.
            ConfigError: momentum cannot be taken over, or the compressor's momentum or decay would not be applied to a
                sparse gradient.
        """
        indices = self.indices(variables)
        kinds = [NONE] * len(self.variables)
        for index, gradient in zip(indices, gradients, strict=True):
            kinds[index] = kind_of(gradient)
        self.take_momentum()
        if self.kinds is None:
            require_agreement(
                self.transport,
                dict(zip(self.names, kinds, strict=True)),
                "kinds of gradients",
                LayoutError,
                "Every rank must compute the same loss from the same variables.",
            )
            self._refuse_sparse_momentum(kinds)
            self.kinds = tuple(kinds)
            # Now: a graph may count the step before it exchanges the gradients.
            self._left_at = 0 if any(e.state.step for e in self._exchanges) else self.adoption.steps
        for name, before, now in zip(self.names, self.kinds, kinds, strict=True):
            if before != now:
                error = (
                    f"the gradient of {name!r} was {before!r} in the first step and is {now!r} now; the set of "
                    "gradients must stay: freeze or unfreeze variables before the first step, or build a new compressor"
                )
                self.fail(LayoutError(error))
        return indices

    def take_momentum(self) -> None:
        """Follow the momentum that the user has given the optimizer since the last step, and after a reset its slots.

        Raises:
            ConfigError: it cannot be taken over, on all ranks.
        """
        try:
            self.adoption.take()
            self._absorb_slots(self.groups if self._has_loaded else ())
            self._has_loaded = False
            self._refuse_sparse_momentum(self.kinds or ())
        except ConfigError as error:
            self.fail_in_step(error)

    def group(self, indices: Sequence[int]) -> Group:
        """The group of exactly these variables; the first call makes it.

        Raises:
            LayoutError: a variable was in another group before.
        """
        indices = tuple(indices)
        known = self._group_of.get(indices[0])
        if known is not None and known.indices == indices:
            return known
        taken = [i for i in indices if i in self._group_of]
        if taken:
            self.fail(
                LayoutError(
                    f"{self.names[taken[0]]!r} is exchanged together with other variables than in the first step; the "
                    "set of gradients and Horovod's groups must stay, or build a new compressor"
                )
            )
        variables = [self.variables[i] for i in indices]
        made = Group(indices, self._layout_of(indices), variables, self._config, self.between, self._loss_scale)
        self.groups.append(made)
        self._exchanges.append(made.exchange)
        self._group_of.update(dict.fromkeys(indices, made))
        self._absorb_slots([made])
        return made

    def exchange(
        self,
        indices: Sequence[int],
        gradients: Sequence[np.ndarray],
        learning_rate: float | None,
        parameters: Sequence[np.ndarray],
    ) -> tuple[list[np.ndarray], int]:
        """Exchange one step of the group of these variables: see :meth:`dgc.tensorflow.engine.group.Group.run`.

        Raises:
            DGCError: this or another rank failed.
        """
        self.take_momentum()  # a graph is not traced anew when the user assigns another one
        if self._left_at:
            self._warn_of_loss()
        follows = self.adoption.taken
        made = self.group(indices).run(gradients, parameters, self.adoption.hyper, learning_rate, follows=follows)
        self._tell_observers()
        return made

    def fail(self, error: DGCError) -> NoReturn:
        """Raise ``error`` here, and on all ranks that are waiting for this one in an exchange.

        Raises:
            DGCError: always.
        """
        # With several groups it is unknown which one the others are in; a rank that raises ends the job anyway.
        if len(self.groups) == 1:
            self.groups[0].fail(error)
        raise error

    def fail_in_step(self, error: DGCError) -> NoReturn:
        """:meth:`fail` within a step, the first one included.

        Raises:
            DGCError: always.
        """
        if self.kinds is None:
            tell_error(self.transport, error)  # they are in :meth:`begin`
            raise error
        self.fail(error)

    # -- saving, ending ------------------------------------------------------------------------------------------

    def _extra_state(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        groups = [
            {"names": g.names, "step": s["step"], "rate": g.rate} for g, s in zip(self.groups, states, strict=True)
        ]
        return {"groups": groups, "kinds": list(self.kinds or ()), "names": self.names}

    def _take_state(self, saved: dict[str, Any]) -> None:
        self._left_at = 0
        saved = self._renamed(saved)
        names = {name: i for i, name in enumerate(self.names)}
        unknown = [name for name in saved["parameters"] if name not in names]
        if unknown:
            raise LayoutError(
                f"the saved compressor state has a variable {unknown[0]!r} that the model has not; it belongs to "
                "another model: build the compressor for the model that was saved, or call reset() to begin with empty "
                "residuals"
            )
        # Without groups the state comes from another framework or from resize, where everything was one group.
        whole = [{"names": list(saved["parameters"]), "step": saved["step"], "rate": None}]
        self._absorb_slots(self.groups if self._has_loaded else ())
        self._has_loaded = False  # no later look at the slots shall replace what is loaded now
        if saved.get("kinds"):
            self.kinds = tuple(saved["kinds"])
        for entry in saved.get("groups", whole):
            if not entry["names"]:
                continue
            group = self.group([names[name] for name in entry["names"]])
            own = {name: saved["parameters"][name] for name in entry["names"]}
            group.exchange.load_state_dict({**saved, "parameters": own, "step": entry["step"]})
            group.rate = entry["rate"]
        self._exchanges[:] = [group.exchange for group in self.groups]
        self.layout = self._layout_of(range(len(self.variables)))

    def remember(self) -> None:
        """Note a few values of every variable, for :meth:`was_changed`."""
        self._seen = [samples(v) for v in self.variables]

    def was_changed(self) -> bool:
        """Whether this rank's variables are others than at :meth:`remember`, which is forgotten."""
        before, self._seen = self._seen, []
        return any((a != samples(v)).any() for a, v in zip(before, self.variables, strict=False))

    def begin_anew(self, forget: bool) -> None:
        """Go on with variables that were broadcast; call it on all ranks.

        Args:
            forget: residuals and momentum belong to a run that was left, by loading another one.
        """
        for group in self.groups:
            if forget:
                group.forget()
                self._has_loaded, self._has_slots, self._lacks_residuals = True, False, True
                self._left_at = self.adoption.steps
            group.compare_again()

    def close(self, keep_transport: bool = False) -> None:
        """End the communication threads and give the memory back; what is still known are options and statistics."""
        super().close(keep_transport)
        for group in self.groups:
            group.release()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state.

        Raises:
            LayoutError: in the middle of a step, or after :meth:`close`.
        """
        if self._is_closed:
            raise LayoutError("the compressor was closed, and has kept no residuals: take its state before close()")
        return super().state_dict()

    def _clear(self) -> None:
        self._left_at = 0
        for group in self.groups:
            group.rate = None
        # A model of another moment was loaded perhaps, with a dense run's slots in its optimizer.
        self._has_loaded = True

    # -- inside --------------------------------------------------------------------------------------------------

    def _layout_of(self, indices: Sequence[int]) -> Layout:
        return make_layout([describe(self.names[i], self.variables[i]) for i in indices], self._config)

    def _renamed(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The state under this model's names: Keras names a loaded model's variables differently, in the same order."""
        before = saved.get("names", self.names)
        if before == self.names or len(before) != len(self.names):
            return saved
        sizes = {n: int(np.prod(v.shape)) for n, v in zip(before, self.variables, strict=True)}
        if any(sizes.get(name) != entry["u"].size for name, entry in saved["parameters"].items()):
            return saved
        now = dict(zip(before, self.names, strict=True))
        groups = [{**g, "names": [now[n] for n in g["names"]]} for g in saved["groups"]]
        return {**saved, "parameters": {now[n]: e for n, e in saved["parameters"].items()}, "groups": groups}

    def _absorb_slots(self, groups: Iterable[Group]) -> None:
        for group in groups:
            members = [self.variables[i] for i in group.indices]
            self._has_slots |= self.adoption.absorb_slots(members, self.variables, group.absorb)

    def _warn_of_loss(self) -> None:
        """Warn of what a model that was loaded without the compressor's state does not hold."""
        steps, self._left_at = self._left_at, 0
        lost = ["momentum"] if any(self.adoption.hyper.momentum) and not self._has_slots else []
        lost += ["what was not sent yet"] if self._lacks_residuals else []
        if lost and self.transport.rank == 0:
            warnings.warn(
                f"the model goes on after {steps} steps, but nothing was loaded into the compressor, which holds "
                f"momentum and residuals: {' and '.join(lost)} is lost. "
                "dgc.tensorflow.keras.callbacks.CompressionCheckpoint keeps both beside a model; in a loop of your own "
                "state_dict() and load_state_dict() of the compressor, on every rank",
                RuntimeWarning,
                stacklevel=2,
            )

    def _refuse_sparse_momentum(self, kinds: Sequence[str]) -> None:
        if SPARSE not in kinds:
            return
        name = self.names[kinds.index(SPARSE)]
        self.adoption.refuse_beside(
            f"the sparse gradients (tf.IndexedSlices) of {name!r}",
            f"{name!r} has sparse gradients (tf.IndexedSlices), which are sent Horovod's own way, but the compressor "
            "applies the momentum; pass sparse_as_dense=True, or momentum=0 to the compressor to leave momentum in the "
            "optimizer",
        )


def kind_of(gradient: Any) -> str:
    """DENSE, SPARSE or NONE."""
    if gradient is None:
        return NONE
    return SPARSE if isinstance(gradient, tf.IndexedSlices) else DENSE


def foreign_variable(variable: Variable) -> LayoutError:
    """The error for a variable that a compressor was not built for."""
    return LayoutError(
        f"{getattr(variable, 'name', '?')!r} is no variable of the model that this compressor was built for; residuals "
        "cannot be shared: build one compressor for each model and optimizer, and a new one when variables are added"
    )

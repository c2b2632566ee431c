"""Variables that are exchanged together, in one crossing from TensorFlow to the core: gradients in, results out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from dgc.core.config import DGCConfig
from dgc.core.exchange.exchange import Exchange, LossScale
from dgc.core.exchange.records import Hyper
from dgc.core.kernels import choose_kernels
from dgc.core.layout import Layout
from dgc.core.transport import Transport
from dgc.errors import DGCError, LayoutError
from dgc.tensorflow.engine.numpy_bridge import APPLY, REFUSED
from dgc.tensorflow.engine.tensors import ResultPool, Variable, as_array, largest_finite, raw_variable, samples
from dgc.transport.agreement import require_replicas


class Group:
    """An exchange of the core over some of a model's variables.

    The wrappers of this package have one group of all variables. Horovod's own classes decide by ``groups=`` which
    gradients are at hand together.

    Attributes:
        indices: places of the group's variables in the model.
        exchange: the core's exchange; its parameters are in the order of ``indices``.
    """

    def __init__(
        self,
        indices: Sequence[int],
        layout: Layout,
        variables: Sequence[Variable],
        config: DGCConfig,
        transport: Transport,
        loss_scale: LossScale,
    ) -> None:
        """Allocate the state. All ranks must have agreed on the variables before.

        The other groups, which run one after the other, use the same transport.

        Raises:
            LayoutError: a message would be too large.
        """
        self.indices = tuple(indices)
        self.names = [p.name for p in layout.parameters]
        self.exchange = Exchange(layout, config, transport, choose_kernels("cpu"), loss_scale=loss_scale)
        shapes = [p.shape for p in layout.parameters]
        wide = [np.float64 if p.dtype == "float64" else np.float32 for p in layout.parameters]
        self._pool = ResultPool(shapes, wide)
        self._limits = [largest_finite(raw_variable(v).dtype) for v in variables]
        self._variables = list(variables)
        self._runs = 0
        self.rate: float | None = None
        """The learning rate that u is in units of, where the adopted velocity contains one."""

    def run(
        self,
        gradients: Sequence[np.ndarray],
        parameters: Sequence[np.ndarray],
        hyper: Hyper,
        learning_rate: float | None,
        *,
        follows: bool,
    ) -> tuple[list[np.ndarray], int]:
        """Exchange one step.

        Args:
            gradients: in the order of ``indices``, of the variables' shapes.
            parameters: values of the variables, or nothing where no weight decay needs them.
            hyper: the options of all variables of the model.
            learning_rate: that of this step, where it is known; the ranks must share it.
            follows: whether the adopted velocity contains it.

        Returns:
            The results in the variables' shapes, float32 (float64 for float64), and what became of the step: APPLY or
            REFUSED.

        Raises:
            DGCError: this or another rank failed.
        """
        if self._runs == 1:
            self._compare_replicas()
        self._runs += 1
        self.exchange.hyper = hyper.chosen(self.indices, () if learning_rate is None else (learning_rate,))
        if learning_rate is not None and follows:
            self.follow(learning_rate)
        # Keras' velocity takes in lr * g: nothing at a rate of 0, at which it goes on moving the variable. Here nothing
        # moves then, so what is sent stays.
        still = learning_rate == 0.0 and follows
        self.exchange.awaits_update = still or bool(self.exchange.joins)  # without data it may be no step at all
        if still:
            self.exchange.hyper.weight_decay = [0.0] * len(self.indices)
            gradients = [np.zeros_like(gradient) for gradient in gradients]
        results = []
        for place, gradient in enumerate(gradients):
            wanted = self.exchange.layout.parameters[place].shape
            if tuple(gradient.shape) != wanted:
                self.exchange.fail(
                    LayoutError(
                        f"the gradient of {self.names[place]!r} is {tuple(gradient.shape)}, the variable was {wanted} "
                        "when the compressor was built; build a new compressor when variables change"
                    ),
                    place,
                )
            result = self._pool.take(place)
            parameter = as_array(parameters[place]) if parameters else None
            self.exchange.submit(place, as_array(gradient), result.reshape(-1), parameter, self._limits[place])
            results.append(result)
        refused = self.exchange.finish()
        if still and not refused:
            self.exchange.drop()
        return results, REFUSED if refused else APPLY

    def fail(self, error: DGCError) -> NoReturn:
        """Raise ``error`` here and its text on all other ranks, which are in the same step or will come to it.

        Raises:
            DGCError: always.
        """
        if self._runs == 1:  # that is what the others do next
            try:
                self._compare_replicas()
            except DGCError as other:
                raise error from other
            self._runs += 1
        self.exchange.fail(error)

    def absorb(self, place: int, u: np.ndarray, learning_rate: float | None) -> None:
        """Take over a momentum buffer of a dense run, of the variable ``place`` of the group, in units of the rate."""
        share = self.exchange.config.own_share(self.exchange.transport.size)
        self.exchange.state.absorb_momentum(place, u, share)
        self.rate = learning_rate

    def compare_again(self) -> None:
        """Compare the ranks' variables once more before the next exchange; call it on all ranks."""
        self._runs = min(self._runs, 1)

    def forget(self) -> None:
        """Empty residuals and momentum; the schedule and the statistics go on."""
        for bucket in self.exchange.state.buckets:
            bucket.u.fill(0)
            bucket.v.fill(0)
            bucket.clear_error()

    def release(self) -> None:
        """Give back the memory of a group that is closed."""
        self._pool = ResultPool([], [])
        for bucket in self.exchange.state.buckets:
            bucket.u, bucket.v = bucket.u[:0].copy(), bucket.v[:0].copy()
            bucket.error = bucket.error[:0].copy()

    def _compare_replicas(self) -> None:
        """Once, before the second exchange: Keras broadcasts the variables of an unbuilt model after its first step."""
        require_replicas(
            self.exchange.transport.whole,
            {n: samples(v) for n, v in zip(self.names, self._variables, strict=True)},
            "before the first step call hvd.broadcast_variables(variables, root_rank=0), or add dgc.callbacks."
            "BroadcastGlobalVariablesCallback(0) to the callbacks of fit() (and build the model before it)",
        )

    def follow(self, learning_rate: float) -> None:
        """Multiply u by lr_old/lr_new. A learning rate of 0 leaves u alone: nothing moves in such a step."""
        if self.rate is not None and learning_rate not in (0.0, self.rate):
            for bucket in self.exchange.state.buckets:
                bucket.u *= bucket.u.dtype.type(self.rate / learning_rate)
        if learning_rate or self.rate is None:
            self.rate = learning_rate

"""Step-ahead error feedback: exchange the optimizer's updates, and use at once what this rank has not sent.

Each rank's optimizer steps on the rank's own gradient. Letters, for one parameter of n elements:

    theta   the shared values, the same on all ranks bit for bit
    a       the sum of this rank's updates, times s, that it has not sent, and its codec's errors
    s       1, or 1 / sqrt(rho) for adaptive optimizers: see noise_scale.py
    p       = theta + a / s, the values with which the model computes; on two ranks theta + a

The optimizer's ``step()`` adds an update to p. After it:

    a     <- a + s * update
    sent   = coded(largest entries of a);  a <- a - sent
    theta <- theta + mean of sent over all ranks, added in rank order
    p     <- theta + a / s             on two ranks theta + a

So a rank feels its own steps at once, and only the contributions of other ranks come late. With plain error feedback
every entry comes about 1 / density steps late. Training at the edge of stability does not bear such a delay.

Steps are sent s times as long, because noise cancels in the mean of all ranks. In p it does not cancel. So with more
than two ranks a rank feels its own steps with the length that its optimizer has chosen. docs/decisions.md has figures.

Arrays are NumPy's, CuPy's or torch's: only operators are used that all of them have.

Source: Xu, Huo, Huang, AAAI 2021, arXiv 2008.05823 (step-ahead error feedback and error averaging).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dgc.core.collectives import Transport
from dgc.core.config import DGCConfig
from dgc.core.exchange.bucket import BucketExchange
from dgc.core.exchange.exchange import Exchange
from dgc.core.exchange.stages import as_dgc_error
from dgc.core.exchange.step import Hyper, StepOptions
from dgc.core.kernels.base import Array, Kernels, subtract
from dgc.core.layout import Parameter, make_layout
from dgc.core.noise_scale import NoiseScale
from dgc.errors import ConfigError, DGCError

# The name of the tensor that carries the numbers of NoiseScale through the exchange.
NOISE = "dgc.noise_scale"


class SharedTensor:
    """The shared values of one parameter of n elements, and what this rank has not sent of it.

    Attributes:
        theta: (n,).
        factors: s, for the whole tensor or for each piece of PIECE elements; None if it is 1.
        shares: 1 / s, or None if p is theta + a.
        a: (n,), or 0.0 for a small parameter that is not coded. With ``late``, the a of a small parameter includes the
            update that is being exchanged.
        residual: the state's array that holds a, (n,); (0,) for a small parameter.
        error: a small parameter's coding error on the host, (n,); (0,) for others, and if it is not coded.
        is_sparsified: whether the largest entries are sent. Other parameters are small and sent whole.
    """

    a: Any
    factors: Array | None = None
    shares: Array | None = None

    def __init__(
        self, theta: Array, residual: Array, error: np.ndarray, kernels: Kernels, convert: Callable[[Array], Array],
        rounding: Callable[[], Callable[[Array], Array] | None],
    ) -> None:  # fmt: skip
        """``convert`` and ``rounding`` are those of :class:`StepAhead`, the latter of this parameter."""
        self.theta, self.residual, self.error = theta, residual, error
        self.is_sparsified = len(residual) > 0
        self._kernels, self._convert, self._rounding = kernels, convert, rounding
        self.update_a()

    def update_a(self) -> None:
        """Read a again after an exchange."""
        unsent = self.residual if self.is_sparsified else self.error
        self.a = self._convert(unsent) if len(unsent) else 0.0  # a view, or a copy on a device

    def place(self) -> Array:
        """Return theta + a / s, (n,), as the parameter's own type holds it. For small parameters it is theta + a."""
        values, rounded = self.theta + 0, self._rounding()
        self.write(values)
        return values if rounded is None else rounded(values)

    def is_edited(self, p: Array) -> Any:
        """Return whether p is not in its :meth:`place`, as a bool or as an array of one bool."""
        if self._is_plain():
            return self._kernels.is_elsewhere(p, self.theta, self.a, self.shares)
        return (p != self.place()).any()

    def take_update(self, p: Array, decay: float, *, lengthens: bool, edited: bool) -> None:
        """Replace p by the update, p minus its place, times s if ``lengthens``.

        Weight decay does not depend on the gradient, so it is not too short, and its part of the update stays. If p was
        ``edited``, the rest of a is forgotten: then a + update becomes p - theta.
        """
        factors = self.factors if lengthens else None
        if edited:
            p -= self.theta
            p -= self.a
        elif self._is_plain():
            self._kernels.take_update(p, self.theta, self.a, self.shares, factors, decay)
        else:
            subtract(p, self.place(), self.theta, factors, decay)

    def write_late(self, p: Array) -> None:
        """Write theta + (a + update) / s into p, which holds the update. The exchange adds the update to a later."""
        p += self.a
        if self.is_sparsified:
            self._kernels.put(p, self.theta, p + 0, self.shares)
        else:
            self.a = p + 0
            p += self.theta

    def write(self, p: Array) -> None:
        """Write the :meth:`place` into p."""
        if self.is_sparsified:
            self._kernels.put(p, self.theta, self.a, self.shares)
        else:
            p[...] = self.theta
            p += self.a

    def round(self) -> None:
        """Round theta to the parameter's own type, so that a checkpoint holds all of it."""
        if (rounded := self._rounding()) is not None:
            self.theta[...] = rounded(self.theta)

    def _is_plain(self) -> bool:
        """Return whether p is not rounded and a is the residual, so that the kernels can compute the place."""
        return self.is_sparsified and self._rounding() is None


class StepAhead:
    """The shared values of one model on one rank, and the exchange of its updates.

    Attributes:
        exchange: holds a, selects, codes and exchanges. For the exchange, updates are gradients.
        tensors: the shared values of each parameter; empty before :meth:`start`.
        noise: finds the factors s; None if updates are proportional to gradients.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        config: DGCConfig,
        transport: Transport,
        kernels: Kernels,
        *,
        rescales: bool,
        convert: Callable[[Array], Array] = lambda array: array,
        to_host: Callable[[Array], np.ndarray] = np.array,
        rounding: Callable[[int], Callable[[Array], Array] | None] = lambda index: None,
    ) -> None:
        """Build the exchange.

        Args:
            parameters: the parameters, equal on all ranks.
            config: the compressor's options.
            transport: connects the ranks.
            kernels: work on the arrays.
            rescales: whether the optimizer divides by the size of its gradients; see :class:`NoiseScale`.
            convert: turns an array of the kernels into a view of the kind that :meth:`step` takes as ``values``.
            to_host: turns an array of that kind into one on the host.
            rounding: returns, for a parameter whose own type holds fewer digits than ``values``, a function that rounds
                values, (n,), to that type; None for others.
        """
        count, self.noise = len(parameters), None
        if rescales:
            self.noise = NoiseScale([p.numel for p in parameters], transport.size, config.seed, convert, to_host)
            parameters = [*parameters, Parameter(NOISE, self.noise.message.shape, "float32")]
        own = replace(
            config, exclude=(*config.exclude, NOISE), momentum=0.0, nesterov=False, weight_decay=0.0,
            momentum_masking=False,
        )  # fmt: skip
        self.layout = make_layout(parameters, own)
        self.exchange = Exchange(self.layout, own, transport, kernels)
        self.exchange.on_refused = self._note_refusal
        self._shortens = True  # whether the latest step's optimizer divides by the size of its gradients
        self._met = ""  # who met a value that is not finite, for the error
        self.tensors: list[SharedTensor] = []
        self._results: Sequence[Array] = ()  # of the exchange that is under way
        self._count, self._transport, self._kernels = count, transport, kernels
        self._convert, self._to_host, self._rounding = convert, to_host, rounding
        self._hyper = Hyper.uniform(len(parameters), own)

    @property
    def shared(self) -> list[Array]:
        """Theta of each parameter, (n,); empty before :meth:`start`."""
        return [tensor.theta for tensor in self.tensors]

    def start(self, values: Sequence[Array]) -> None:
        """Make the values of the parameters, each (n,), the shared ones. They must be equal on all ranks."""
        state = self.exchange.state
        self.tensors = [
            SharedTensor(
                p + 0, state.residual(i), state.error(i), self._kernels, self._convert, partial(self._rounding, i)
            )
            for i, p in enumerate(values)
        ]
        self._update_factors()

    def load_noise(self, saved: list[list[float]]) -> None:
        """Load the running means of :class:`NoiseScale`; :meth:`start` has to follow."""
        if self.noise is not None:
            self.noise.load(saved)

    def is_edited(self, values: Iterable[Array]) -> bool:
        """Return whether p of some parameter, (n,) each, is not in its place."""
        # A sum of arrays on a device is waited for once.
        return bool(sum(tensor.is_edited(p) for tensor, p in zip(self.tensors, values, strict=True)))

    def step(
        self, values: Sequence[Array], gradients: Sequence[Array | None], decays: Sequence[float],
        sent: Sequence[Array], arrays: Sequence[Array], *, late: bool = False, ready: Any = None,
        edited: bool = False, joins: int = 0, learning_rates: tuple[float, ...] = (), rescales: bool = True,
    ) -> None:  # fmt: skip
        """Exchange the updates of one optimizer step, and write the new p, also after an error.

        Args:
            values: p of each parameter after the optimizer's step, (n,). They hold the next p afterwards.
            gradients: the gradients that the optimizer has used, (n,), or None.
            decays: for each parameter, the share of p that the optimizer has taken off as decoupled weight decay.
            sent: memory for the updates, (n,): that of ``values`` or, with ``late``, other memory.
            arrays: the memory ``sent`` as arrays of the kernels.
            late: return at once, and apply what comes from the other ranks in the next call.
            ready: see :class:`~dgc.core.exchange.step.Submission`.
            edited: whether the script has changed parameters outside of the optimizer's step on this rank. If it has on
                any rank, all ranks send everything. Theta becomes the mean of p; of a rank without edits, of theta + a.
            joins: see :class:`~dgc.core.exchange.step.StepOptions`.
            learning_rates: those of the optimizer's groups, which must be equal on all ranks.
            rescales: whether this optimizer divides by the size of its gradients, if the first one does.

        Raises:
            ConfigError: ranks disagree, or an update was not finite on some rank. No rank has taken it.
            DGCError: this rank or another one failed.
        """
        try:
            try:
                if self.exchange.in_step:
                    self.exchange.wait()  # until the communication thread has added the latest update to a
                for tensor, p, decay in zip(self.tensors, values, decays, strict=True):
                    tensor.take_update(p, decay, lengthens=rescales, edited=edited)
                self._shortens = rescales
            finally:
                self.settle()  # also after an error, as on the other ranks
            if edited or not rescales:
                for tensor in self.tensors:
                    tensor.shares = None
            if late:
                for tensor, p, update in zip(self.tensors, values, sent, strict=True):
                    update[...] = p
                    tensor.write_late(p)
            hyper = replace(self._hyper, learning_rates=learning_rates)
            options = StepOptions(hyper, joins=joins, edited=edited)
            self._begin(sent, arrays, gradients, ready, options)
        except BaseException as error:
            self._update_a()
            try:
                if isinstance(error, Exception) and not isinstance(error, DGCError):
                    self.exchange.fail(as_dgc_error(error))  # the other ranks wait in this step
                raise
            finally:
                self.write(values)
        if late:
            return
        try:
            self.settle()
        finally:
            self.write(values)

    def settle(self) -> None:
        """Wait for the exchange that is under way, and apply it to theta and a. The caller writes p."""
        if self.exchange.in_step:
            try:
                self._settle()
            finally:
                self._update_a()

    def _settle(self) -> None:
        exchange, results = self.exchange, self._results
        self._results = ()
        if exchange.finish():
            raise ConfigError(
                f"a step of the optimizer gave NaN, infinity or an overflow, met by {self._met}: no rank has taken it. "
                "Look for the cause (learning rate, data), and go on from a checkpoint"
            )
        if len(exchange.joined) == self._transport.size:  # no rank has data: the exchange was undone
            return
        for tensor, result in zip(self.tensors, results, strict=True):
            tensor.theta += result
        if self.noise is not None:
            self.noise.learn()
            self._update_factors()
        if exchange.edited:
            exchange.stats.add_sent(self._send_rest())

    def average(self, values: Sequence[Array]) -> None:
        """Send all that is left, uncompressed, so that p = theta on all ranks. Collective.

        If the script has changed parameters of any rank since the last step, theta becomes the mean of p.

        Source: arXiv 2008.05823, error averaging.
        """
        self.settle()
        flag = np.array([self.is_edited(values)], np.float32)
        self._transport.allreduce(flag, "max")
        sent = self._send_rest(values if flag[0] else None)
        self.exchange.stats.total.count_collective(flag.nbytes + sent)
        for tensor in self.tensors:
            tensor.round()
        self.write(values)

    def edits(self, values: Sequence[Array]) -> list[Array] | None:
        """Return p minus its place for each parameter, (n,); None if the script has changed none since a step."""
        if not self.is_edited(values):
            return None
        return [p - tensor.place() for tensor, p in zip(self.tensors, values, strict=True)]

    def find_edited(self, values: Iterable[Array]) -> list[bool]:
        """Return for each parameter whether the script has changed it since a step, to finite values."""
        # The difference of a value that is not finite and itself is NaN.
        return [
            bool(tensor.is_edited(p)) and bool((p - p == 0).all())
            for tensor, p in zip(self.tensors, values, strict=True)
        ]

    def write(self, values: Sequence[Array]) -> None:
        """Write each parameter's place into p, (n,) each."""
        for tensor, p in zip(self.tensors, values, strict=True):
            tensor.write(p)

    def restart(self, values: Sequence[Array] = (), keeps: Sequence[bool] = ()) -> None:
        """Forget the shared values after a reset of the exchange; :meth:`start` has to follow.

        Write theta into ``values``, p of each parameter, (n,), except where ``keeps`` is true.
        """
        for p, theta, is_kept in zip(values, self.shared, keeps or [False] * len(values), strict=False):
            if not is_kept:
                p[...] = theta
        self._results, self.tensors = (), []

    # -- inside ------------------------------------------------------------------------------------------------------

    def _update_a(self) -> None:
        for tensor in self.tensors:
            if not tensor.is_sparsified:
                tensor.update_a()

    def _update_factors(self) -> None:
        if self.noise is not None:
            factors = self._convert(self.noise.scales())
            for tensor, groups in zip(self.tensors, self.noise.groups, strict=True):
                tensor.factors = factors[groups]
                tensor.shares = 1 / factors[groups] if self.noise.shortens and self._shortens else None

    def _note_refusal(self, bucket: BucketExchange) -> None:
        self._met = bucket.met(self._transport.rank, [p.name for p in self.layout.parameters], "update")

    def _begin(
        self, sent: Sequence[Array], arrays: Sequence[Array], gradients: Sequence[Array | None], ready: Any,
        options: StepOptions,
    ) -> None:  # fmt: skip
        exchange, noise = self.exchange, self.noise
        exchange.begin(options)
        if noise is not None:
            noise.measure(exchange.state.step, gradients)
            exchange.submit(self._count, noise.message, noise.message)
        for i, update in enumerate(arrays):
            exchange.submit(i, update, update, ready=ready)
        self._results = sent

    def _send_rest(self, values: Sequence[Array] | None = None) -> int:
        """Theta <- theta + mean of a, or mean of p if ``values`` are given; a <- 0.

        Also forget the thresholds, which differ between ranks.

        Returns:
            The number of bytes that this rank has sent.
        """
        state, memory, ranks, sent = self.exchange.state, self._kernels.memory, self._transport.size, 0
        for bucket in state.buckets:
            bucket.return_owned(sparse=True, small=True)
        for i, tensor in enumerate(self.tensors):
            theta, total = tensor.theta, tensor.error
            if tensor.is_sparsified:
                if values is not None:
                    tensor.a[...] = values[i] - theta
                total = memory.to_host(tensor.residual)
            elif values is not None:
                total = self._to_host(values[i] - theta)
            if not len(total):
                continue
            self._transport.allreduce(total, "sum")
            sent += total.nbytes
            total /= ranks
            if tensor.is_sparsified:
                memory.copy_in(tensor.residual, total)
                theta += tensor.a
                memory.fill(tensor.residual, 0.0)
            else:
                theta += self._convert(total)
        for bucket in state.buckets:
            bucket.clear_error()
            bucket.thresholds.fill(np.nan)
        self._update_a()
        return sent

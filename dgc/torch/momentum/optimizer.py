"""``DGCMomentum``: Paddle's ``DGCMomentumOptimizer`` for PyTorch, exchanging gradients itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from dgc.adapter.engine import Uncopied, own_state
from dgc.adapter.paddle import (
    COMPRESSED_TYPES,
    MIN_NUMEL,
    ExchangeMethods,
    PaddleOptions,
    Regularizer,
    StateError,
    as_state_error,
    check_regularizer,
    coefficients,
    config_for,
    require_parameters,
    sparse_refusal,
)
from dgc.core.transport import Transport
from dgc.errors import ConfigError, DGCError, LayoutError, RemoteError
from dgc.torch.distributed import job_of, require_own_shards
from dgc.torch.engine import Engine
from dgc.torch.horovod import Heartbeat, TorchHorovod
from dgc.torch.momentum import state as momentum_state
from dgc.torch.sparse_updates import refusal_of_rate
from dgc.torch.tensors import describe
from dgc.torch.untraced import untraced
from dgc.transport.agreement import agree_or_raise


class DGCMomentum(Uncopied, ExchangeMethods, Optimizer):
    """Momentum SGD with Deep Gradient Compression, under Paddle's names.

    ``step()`` exchanges the local gradients of all ranks and updates the parameters; do not wrap it in a
    ``DistributedOptimizer``. Before ``rampup_begin_step`` it is momentum SGD on averaged gradients. From then on every
    tensor of at least ``min_numel`` elements sends its largest accumulated entries and keeps the rest for later.
    After ``step()`` each ``p.grad`` holds what the learning rate was multiplied by, or is None where the entries that
    came were applied without a dense gradient (``sparse_updates=False`` and ``minimize`` make one).

    With one process nothing is compressed, whatever the step: that would only delay updates. Paddle refuses to run
    then; here it is a warning, so that a script can be tried out without a launcher.

    Source: PaddlePaddle 1.6, ``DGCMomentumOptimizer``; Lin et al. 2018, arXiv 1712.01887.
    """

    # GradScaler.step() then calls step() on every rank, also on one whose gradients overflowed; a rank that stayed
    # away would leave the others waiting.
    _step_supports_amp_scaling = True
    _shows_gradients = False  # minimize() returns them
    _scale = 1.0  # a GradScaler's, in this step
    _fuse_elementwise = False  # step() exchanges gradients, so fuse_optimizer must leave it whole

    def __init__(
        self,
        params: Any = None,
        learning_rate: float | None = None,
        momentum: float | None = None,
        rampup_begin_step: int | None = None,
        rampup_step: int = 1,
        sparsity: Sequence[float] = (0.999,),
        use_nesterov: bool = False,
        local_grad_clip_norm: float | None = None,
        num_trainers: int | None = None,
        regularization: Regularizer = None,
        name: str | None = None,
        *,
        lr: float | None = None,
        min_numel: int = MIN_NUMEL,
        dtypes: Sequence[str] = COMPRESSED_TYPES,
        exclude: Sequence[str] = (),
        process_set: Any = None,
        transport: str | Transport = "auto",
        **codecs: Any,
    ) -> None:
        """Build the optimizer; collective over the process set.

        Args:
            params: parameters, (name, parameter) pairs or group dicts. A group may have its own ``lr``, ``momentum``,
                ``nesterov`` and ``regularization``. A parameter's own attribute ``regularizer`` goes before both.
            learning_rate: the step size.
            momentum: the momentum factor, in [0, 1).
            rampup_begin_step: the first compressed step, counted from 0.
            rampup_step: steps over which ``sparsity`` is walked through.
            sparsity: shares of entries held back, each for an equal part of the ramp-up; the last one stays.
            use_nesterov: Nesterov momentum.
            local_grad_clip_norm: c; the local gradient of a compressed tensor is scaled down to an L2 norm of
                c * sqrt(P).
            num_trainers: P; needed for clipping, and checked.
            regularization: ``L1Decay(c)``, ``L2Decay(c)`` or None.
            name: shown in ``repr``.
            lr: another name for ``learning_rate``.
            min_numel: smaller tensors are sent dense.
            dtypes: names of the types that are compressed; float64 never is.
            exclude: name patterns (fnmatch) of parameters that are sent dense.
            process_set: the Horovod process set to average over; None means all ranks, those of torch.distributed
                where it is initialised and Horovod is not.
            transport: "auto", "mpi", "horovod" or a transport.
            **codecs: ``indices="elias_fano"``, ``values="float32"``, ``bucket_bytes=25 MiB``,
                ``momentum_masking=True``, ``sparse_updates=True``.

        Raises:
            ArgumentError: (an AssertionError) what Paddle asserts: missing learning rate or momentum, a negative
                ``rampup_begin_step``, a clipping norm that is no float, ``num_trainers`` missing for it or not the
                number of ranks, a regulariser of another kind.
            ConfigError: (a ValueError) another option out of range, or neither Horovod nor torch.distributed is
                initialised.
            TypeError: ``params`` or ``rampup_begin_step`` is missing, or an unknown option.
            LayoutError: ranks disagree about the parameters.
        """
        if hasattr(type(self), "skip_synchronize"):  # Horovod derives a class from this one
            raise ConfigError("DGCMomentum averages gradients itself; use it as it is, without DistributedOptimizer")
        require_parameters(params)
        job = job_of().of(process_set)
        job.require_ready()
        self._transport = job.make_transport(transport)

        def build() -> dict[str, Any]:
            if learning_rate is not None and lr is not None:
                raise ConfigError("learning_rate and lr mean the same; give one of them")
            self.options = PaddleOptions(
                learning_rate if lr is None else lr,
                momentum,  # type: ignore[arg-type]
                rampup_begin_step,  # type: ignore[arg-type]
                rampup_step,
                sparsity,
                use_nesterov,
                local_grad_clip_norm,
                num_trainers,
                regularization,
                name,
                min_numel,
                dtypes,
                exclude,
                codecs,
            )
            self.options.check_rate_is_number()
            self.options.check_ranks(self._transport.size)
            defaults = {
                "lr": self.options.learning_rate,
                "momentum": float(self.options.momentum),
                "nesterov": self.options.use_nesterov,
                "regularization": regularization,
            }
            super(DGCMomentum, self).__init__(params, defaults)
            self._named = momentum_state.named_parameters(self.param_groups)
            require_own_shards(self._named, job)
            return momentum_state.describe(self.param_groups, self._named)

        agree_or_raise(self._transport, build, "arguments")
        named = [(n, p) for n, p in self._named if p.requires_grad]
        config, self._compressed = config_for(self.options, [describe(n, p) for n, p in named], self._transport.size)
        self._engine = Engine(named, config, self._transport, optimizer=None, loss_scale=lambda: self._scale)
        self._engine.updates.obstacle = lambda _: self._obstacle()
        if isinstance(job, TorchHorovod) and self._transport.name == "horovod" and self._transport.size > 1:
            self._engine.on_step_begin = Heartbeat(job)

    # -- training ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Exchange this step's gradients and update the parameters. Collective.

        A parameter without a gradient on this rank counts as zero. With a ``GradScaler``, call ``scaler.step(self)``:
        a step in which any rank overflowed is left out on all ranks, and what was sent in it is not lost.

        Args:
            closure: recomputes the loss and the gradients.

        Returns:
            The closure's loss, or None.

        Raises:
            LayoutError: a gradient of a parameter that was frozen when the optimizer was built.
            ConfigError: a sparse gradient of a compressed parameter, or options or learning rates that differ between
                ranks; before any parameter is updated.
            DGCError: another rank failed.
        """
        loss = None if closure is None else self._evaluate(closure)
        scale = getattr(self, "grad_scale", None)
        self._scale = 1.0 if scale is None else float(scale)
        refused_before = self._engine.stats.refused_steps
        exchanged = self._take_options()
        for i, p, group in reversed(exchanged):  # as a backward pass would: the last layers' bucket leaves first
            self._submit(i, p, group)
        self._engine.finish()
        # Without a scaler a NaN shall be seen, as with any optimizer.
        if getattr(self, "found_inf", None) is not None and self._engine.stats.refused_steps > refused_before:
            return loss
        self._engine.updates.apply(self)
        for _, p, group in exchanged:
            if p.requires_grad and p.grad is not None:
                if self._scale != 1.0:
                    p.grad.div_(self._scale)
                p.add_(p.grad, alpha=-float(group["lr"]))
        return loss

    def minimize(
        self,
        loss: torch.Tensor,
        startup_program: object = None,
        parameter_list: object = None,
        no_grad_set: object = None,
        grad_clip: object = None,
    ) -> tuple[list[Any], list[tuple[torch.Tensor, torch.Tensor]]]:
        """One whole iteration: clear the gradients, ``loss.backward()``, ``step()``.

        Args:
            loss: the value to minimise, with its graph.
            startup_program: must be None; so must ``parameter_list``, ``no_grad_set`` and ``grad_clip``.
            parameter_list: give the optimizer the parameters instead.
            no_grad_set: freeze parameters with ``requires_grad_(False)`` before building the optimizer instead.
            grad_clip: use ``local_grad_clip_norm`` instead.

        Returns:
            An empty list (there are no operators here), and (parameter, its ``.grad`` after the step) pairs.

        Raises:
            ConfigError: one of the other arguments is given.
        """
        others = dict(
            startup_program=startup_program, parameter_list=parameter_list, no_grad_set=no_grad_set, grad_clip=grad_clip
        )
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ConfigError(
                f"minimize got {given[0]}, which has no meaning here: the parameters are those the optimizer was built "
                "for, frozen ones are left out, and local_grad_clip_norm clips"
            )
        self.zero_grad()
        loss.backward()
        self._shows_gradients = True
        try:
            self.step()
        finally:
            self._shows_gradients = False
        return [], [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's constructor calls this; later groups are refused.

        Raises:
            ConfigError: the optimizer is built already, or the group has ``weight_decay``.
            ArgumentError: the group's ``regularization`` is no regulariser.
        """
        if hasattr(self, "_engine"):
            raise ConfigError("parameters cannot be added to DGCMomentum: build a new one with all of them")
        if "weight_decay" in param_group:
            raise ConfigError("a parameter group has weight_decay; give it regularization=L2Decay(coefficient)")
        super().add_param_group(param_group)
        # Plain numbers, so that a state dict loads with weights_only=True and a scheduler can change them.
        chosen = check_regularizer(self.param_groups[-1].pop("regularization"), "a group's regularization")
        self.param_groups[-1]["l1_decay"], self.param_groups[-1]["l2_decay"] = coefficients(chosen)

    # -- saving --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, as copies: it differs between ranks, so save one per rank and never broadcast it.

        Returns:
            ``"state"``: by parameter number ``"u"`` (the momentum buffer) and, where compressed, ``"v"`` (what was not
            sent yet), in the parameter's shape; ``"param_groups"``; ``"step"``, ``"rank"`` and ``"size"``.
        """
        full = super().state_dict()
        full.update(momentum_state.to_torch(self._engine.state_dict(), self._named))
        return full

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]], resize: bool = False
    ) -> None:
        """Continue from a saved state; call it on all ranks.

        Args:
            state_dict: what :meth:`state_dict` returned on this rank; with ``resize=True`` a list of all old ranks'.
            resize: redistribute the state of N old ranks to this job's M ranks, so that the mean residual is kept.

        Raises:
            StateError: (an AssertionError and a ValueError) it belongs to another model, rank or number of ranks.
            RuntimeError: a buffer is neither a tensor nor an array.
        """
        self._engine.abandon()  # the transport belongs to a step until it is over
        advice = "Load a state on every rank, each its own."
        agree_or_raise(self._transport, lambda: self._load(state_dict, resize), "states", LayoutError, advice)

    set_dict = load_state_dict
    """Paddle's name."""

    uncopied = (
        "DGCMomentum cannot be copied or pickled, as it holds a connection to the other ranks: build a new one on "
        "every rank, and hand it this one's state with load_state_dict(optimizer.state_dict())"
    )

    def __repr__(self) -> str:
        return super().__repr__() if self.options.name is None else f"{self.options.name}: {super().__repr__()}"

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _exchanges(self) -> Engine:
        return self._engine

    def _load(self, state_dict: Any, resize: bool) -> dict[str, Any]:
        states = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
        if not resize and not isinstance(state_dict, Mapping):
            raise StateError(f"load_state_dict got {len(states)} states; pass this rank's own, or resize=True")
        momentum_state.check_groups(states[0], self.param_groups)
        loaded = [momentum_state.from_torch(state, self._named) for state in states]
        with as_state_error():
            own = own_state(loaded, self._transport, self.options.rampup_begin_step) if resize else loaded[0]
            self._engine.load_state_dict(own)
        for group, saved in zip(self.param_groups, states[0]["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
        return {"step": own["step"], **momentum_state.describe(self.param_groups, self._named)}

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        try:
            with torch.enable_grad():
                return closure()
        except Exception as error:
            # The other ranks are on their way into the exchange.
            with contextlib.suppress(DGCError):
                self._engine.fail(RemoteError(f"the closure failed: {type(error).__name__}: {error}"))
            raise

    def _take_options(self) -> list[tuple[int, torch.Tensor, dict[str, Any]]]:
        """Hand the engine what groups and parameters say now; it is compared among the ranks.

        Returns:
            (index, parameter, group) of those that are exchanged.
        """
        hyper, exchanged = self._engine.adoption.hyper, []
        try:
            self._engine.learning_rates = tuple(float(group["lr"]) for group in self.param_groups)
            for group in self.param_groups:
                for p in group["params"]:
                    i = self._engine.adoption.index_of(p)
                    if i is not None:
                        hyper.momentum[i], hyper.nesterov[i] = float(group["momentum"]), bool(group["nesterov"])
                        hyper.weight_decay[i] = max(_decay(group, p))
                        exchanged.append((i, p, group))
                    elif p.grad is not None:
                        raise LayoutError(
                            "a parameter that needed no gradient when the optimizer was built has one now; build the "
                            "optimizer after all its parameters require gradients"
                        )
        except Exception as error:
            # The other ranks are on their way into the exchange.
            if not isinstance(error, DGCError):
                error = ConfigError(f"an option of a parameter group: {type(error).__name__}: {error}")
            self._engine.fail(error)
        return exchanged

    def _submit(self, i: int, p: torch.Tensor, group: dict[str, Any]) -> None:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if p.grad.is_sparse:
            if i in self._compressed:
                advice = ", or give the embedding sparse=False"
                self._engine.fail(sparse_refusal(self._engine.names[i], advice), i)
            p.grad = p.grad.to_dense()
        # G = clip(g) + c * sign(p) is G = clip(g) + c * x with another x: the core adds it where it adds weight decay.
        p.grad = self._engine.submit(i, p.grad, torch.sign(p) if _decay(group, p)[0] else None)

    def _obstacle(self) -> str | None:
        """Why the results of a step that begins must be dense; see :mod:`dgc.torch.sparse_updates`."""
        if self._shows_gradients:
            return "minimize() returns gradients"
        if self._scale != 1.0:
            return "a GradScaler's scale is in them"
        return next(filter(None, (refusal_of_rate(group["lr"]) for group in self.param_groups)), None)


def _decay(group: dict[str, Any], p: torch.Tensor) -> tuple[float, float]:
    """(L1, L2) coefficients of a parameter, of which one at most is not 0."""
    own = getattr(p, "regularizer", None)
    if own is None:
        return group["l1_decay"], group["l2_decay"]
    return coefficients(check_regularizer(own, "a parameter's regularizer"))

"""Compress and average the gradients of ``DistributedDataParallel`` with its communication hook.

state = dgc.ddp.register(model, optimizer, dgc.Compression.dgc(sparsity=0.999))

is short for

state = dgc.ddp.CompressionState(dgc.Compression.dgc(sparsity=0.999), optimizer, model.module.named_parameters())
model.register_comm_hook(state, dgc.ddp.compression_hook)

DDP calls the hook for each bucket of gradients that the backward pass completes. The call for the last bucket waits for
the results, so ``.grad`` holds them when ``backward()`` returns, as without the hook.

The callbacks for Hugging Face's Trainer and for Lightning register the hook, and save its state in checkpoints. With
Accelerate and Fabric, use the state that :func:`register` returns. docs/pytorch.md shows the code for all four.
"""

# No "from __future__ import annotations": DDP compares the hook's annotations with types.
import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from dgc.adapter.agreement import agree_or_raise
from dgc.adapter.compressor import check_compression
from dgc.adapter.job import errors_on_all_ranks
from dgc.core.collectives import gather_values
from dgc.errors import ConfigError, LayoutError
from dgc.torch.compressor import DGCCompressor, named_pairs
from dgc.torch.ddp_front_end import DDPFrontEnd
from dgc.torch.distributed import DistributedJob
from dgc.torch.front_end import require_free, unwrapped
from dgc.torch.step_ahead import StepAheadEngine
from dgc.torch.untraced import untraced, weakly

if TYPE_CHECKING:
    import lightning
    import transformers

_FILE = "compression.pt"  # the compressor's state in a checkpoint of Hugging Face's Trainer

__all__ = ["CompressionState", "compression_hook", "lightning_callback", "register", "trainer_callback"]


class CompressionState(Joinable):
    """The state of :func:`compression_hook`: a compressor and the optimizer of one DDP model.

    With ``Join([model, state])`` a rank that has run out of data makes the same updates as the other ranks.

    Attributes:
        compression: the compressor, for its statistics, ``describe()`` and ``state_dict()``.
    """

    def __init__(
        self,
        compression: DGCCompressor,
        optimizer: torch.optim.Optimizer | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Bind the compressor if the optimizer exists already. Collective.

        Args:
            compression: a compressor of ``dgc.Compression`` that is used nowhere else.
            optimizer: the optimizer that steps the model. Without it, call :meth:`bind` before the first backward pass.
            named_parameters: ``model.named_parameters()``, for names in messages, logs and ``exclude=``.
            process_group: the process group that DDP was given, if any.

        Raises:
            ConfigError: ``compression`` is not a compressor of this framework, or :meth:`bind` raises it.
        """
        super().__init__()
        # Without an optimizer this call is not collective, so no other rank waits for this one.
        with contextlib.nullcontext() if optimizer is None else errors_on_all_ranks(DistributedJob(process_group)):
            check_compression(compression, DGCCompressor, "dgc.torch")
            if not isinstance(compression, DGCCompressor):
                raise ConfigError(
                    f"compression is {compression!r}; DDP's hook takes a compressor, such as dgc.Compression.dgc(). "
                    "For dense gradients leave the hook out; for 16 bits call "
                    "model.register_comm_hook(None, default_hooks.fp16_compress_hook), which is PyTorch's own"
                )
            self._named = None if named_parameters is None else list(named_parameters)
        self.compression = compression
        self._group = process_group
        self._optimizer: torch.optim.Optimizer | None = None
        self._front_end: DDPFrontEnd | None = None  # stays None in a job of one process, and with step-ahead
        self._model: Callable[[], DistributedDataParallel | None] = lambda: None
        self._former_join: Any = None  # of the model, from before the registration: torch keeps it after Join has ended
        self._hook: Callable[[], JoinHook | None] = lambda: None  # with step-ahead, of the Join that is under way
        if optimizer is not None:
            self.bind(optimizer)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self.compression.engine is None:
            return super().__reduce_ex__(protocol)
        raise TypeError(
            "a DDP model with dgc's hook cannot be copied or pickled, as the compressor holds this rank's residuals: "
            "use the module inside it, as in AveragedModel(model.module), copy.deepcopy(model.module) and "
            "torch.save(model.module.state_dict(), path)"
        )

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Adopt the momentum of the optimizer that steps the model. Collective; call it once, before any backward pass.

        Args:
            optimizer: a plain optimizer, or Accelerate's, Lightning's or Fabric's wrapper of it.

        Raises:
            ConfigError: this is not a plain optimizer, its gradients are exchanged already, or Horovod's size differs.
            LayoutError: ranks disagree about the parameters.
        """
        self.compression.use_job(DistributedJob(self._group))
        with self.compression.errors_on_all_ranks():
            optimizer = unwrapped(optimizer)
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ConfigError(f"optimizer is {optimizer!r}; give a torch.optim.Optimizer")
            if hasattr(optimizer, "skip_synchronize"):
                raise ConfigError(
                    "this optimizer exchanges gradients itself; give the hook the plain optimizer, or use the "
                    "distributed one without the hook"
                )
            _require_same_size()
            named = named_pairs(optimizer, self._named)
            if not self.compression.is_bound:  # otherwise bind() raises the error
                require_free([p for _, p in named])
        self.compression.bind(named, optimizer)
        self._optimizer = optimizer
        if (engine := self.compression.engine) is not None and not self.compression.config.steps_ahead:
            self._front_end = DDPFrontEnd(engine, optimizer)
            # A weak reference: an error that the engine keeps may refer to this object through its traceback.
            weakref.finalize(self, weakly(self._front_end.end)).atexit = False

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Submit a bucket's gradients; with the last bucket wait for all results."""
        if self._optimizer is None:
            raise ConfigError(
                "the hook has no optimizer, whose momentum would be applied twice: give it as "
                "CompressionState(compression, optimizer), or call state.bind(optimizer) before the first backward pass"
            )
        buffer = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        if self._front_end is None:
            if isinstance(engine := self.compression.engine, StepAheadEngine):
                engine.require_own(bucket.parameters())
                self._require_in_join(engine)
                joins = self._join_config.enable and self._hook() is not None
                if joins and engine.passes and bucket.index() == 0:
                    engine.fail(
                        ConfigError(
                            "two backward passes without a step() between them, within Join: there a rank without data "
                            "makes a step after each pass. To add up gradients, call model.no_sync() for each pass "
                            "that no step() follows"
                        )
                    )
                engine.passes = True
            future.set_result(buffer)
        else:
            self._front_end.hand_over(bucket, future)
        return future

    def _require_in_join(self, engine: StepAheadEngine) -> None:
        """Require that a ``Join`` with the model has this state, too. A rank without data would not exchange."""
        model = self._model()
        if model is None or model._join_config is self._former_join:
            return
        if model._join_config.enable and not self._join_config.enable:
            engine.fail(
                ConfigError(
                    "Join([model]) lacks the compressor, so a rank without data would miss the others' updates: use "
                    "Join([model, state])"
                )
            )

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Call ``compression.average(optimizer)`` and return ``compression.state_dict()``. Collective, between steps.

        With step-ahead error feedback this changes the model and the optimizer in place, so that the ranks are equal.

        Raises:
            LayoutError: it was called within a step, or after a step that failed.
        """
        self.compression.average(self._optimizer)
        return self.compression.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a result of :meth:`state_dict`, on any number of ranks. Call it on all ranks. {} resets.

        Raises:
            LayoutError: the state belongs to another model or op, or is damaged. No rank's state is changed.

        Warns:
            RuntimeWarning: a single process exchanges nothing, so it drops the gradients that the ranks had not sent.
        """
        self.compression.load_state_dict(state_dict)

    # -- Join ------------------------------------------------------------------------------------------------------

    @property
    def join_device(self) -> torch.device:
        """Raise an error: ``Join`` asks the first member of its list, and the first member must be the model.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("the model comes first: Join([model, state])")

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the model."""
        return dist.group.WORLD if self._group is None else self._group

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Return the hook that makes the other ranks' updates on a rank without data. It runs after DDP's own hook.

        Raises:
            ConfigError: an option of ``Join`` would change what the compressor computes, or a GradScaler is in use.
        """
        if not kwargs.get("divide_by_initial_world_size", True):
            raise ConfigError("divide_by_initial_world_size=False: the compressor divides by all ranks; leave it out")
        front_end, engine = self._front_end, self.compression.engine
        if isinstance(engine, StepAheadEngine):
            hook = _StepAheadJoin(engine)
            self._hook = weakref.ref(hook)  # Join holds it; after an error within Join nobody is told of the end
            return hook
        if front_end is None or engine is None:
            return JoinHook()
        if callable(engine.exchange.loss_scale):
            raise ConfigError(
                "with a GradScaler a rank without data cannot follow the others' steps: use Join([model]) alone, and "
                "momentum=0 in the compressor"
            )
        return _Update(front_end)


class _StepAheadJoin(JoinHook):
    """Takes part in the exchanges of updates on a rank without data."""

    def __init__(self, engine: StepAheadEngine) -> None:
        self._engine = engine
        engine.passes = False

    @override
    def main_hook(self) -> None:
        # DDP's own hook has called the communication hook, unless the other ranks' pass was in no_sync().
        if self._engine.passes:
            self._engine.exchange_nothing()

    @override
    def post_hook(self, is_last_joiner: bool) -> None:
        self._engine.end_join()


class _Update(JoinHook):
    def __init__(self, front_end: DDPFrontEnd) -> None:
        self._front_end = front_end

    @override
    def main_hook(self) -> None:
        self._front_end.step_joined()


def register(model: torch.nn.Module, optimizer: torch.optim.Optimizer, compression: DGCCompressor) -> CompressionState:
    """Register the hook on a DDP model. Collective; call it after all wrapping, before the first backward pass.

    Args:
        model: a ``DistributedDataParallel``, or a wrapper of one.
        optimizer: the optimizer that steps the model: plain, or Accelerate's, Lightning's or Fabric's wrapper of it.
        compression: a compressor of ``dgc.Compression`` that is used nowhere else.

    Returns:
        The hook's state, which saves and loads the compressor's. If a job of one process does not use DDP, nothing is
        registered, and the optimizer keeps its momentum.

    Raises:
        ConfigError: a job of several processes has no DDP model, or :class:`CompressionState` raises it.
        LayoutError: ranks disagree about the parameters.
    """
    alone = not (dist.is_initialized() and dist.get_world_size() > 1)
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if not found and alone:
        return CompressionState(compression)
    if len(found) != 1:  # raise on this rank only: the process group of the other ranks' DDP is unknown here
        raise ConfigError(
            f"the model holds {len(found)} DistributedDataParallel modules; wrap it in one, then register"
        )
    (wrapped,) = found
    state = CompressionState(compression, optimizer, wrapped.module.named_parameters(), wrapped.process_group)
    wrapped.register_comm_hook(state, compression_hook)
    state._model, state._former_join = weakref.ref(wrapped), wrapped._join_config
    return state


@untraced
def compression_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Compress and average a bucket of gradients. Give it to DDP's ``register_comm_hook``.

    Raises:
        ConfigError: no optimizer was bound, or a gradient cannot be compressed.
        DGCError: this or another rank failed.
    """
    if not isinstance(state, CompressionState):
        raise ConfigError(f"the hook's state is {state!r}; give a dgc.ddp.CompressionState(compression, optimizer)")
    return state.exchange(bucket)


def _require_same_size() -> None:
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized() and hvd.size() != dist.get_world_size():
        raise ConfigError(
            f"Horovod has {hvd.size()} ranks and torch.distributed {dist.get_world_size()}: start the job with one "
            "launcher, and leave hvd.init() out"
        )


# -- callbacks ---------------------------------------------------------------------------------------------------------


def trainer_callback(trainer: "transformers.Trainer", compression: DGCCompressor) -> "transformers.TrainerCallback":
    """Return a callback for ``trainer.add_callback`` that compresses gradients, and saves the compressor's state.

    The state is saved in each checkpoint's folder, as ``compression.pt``. A resumed training loads it from
    ``args.resume_from_checkpoint`` if that is a folder, else from the folder in ``args.output_dir`` for the
    checkpoint's step.

    Args:
        trainer: the Trainer of Hugging Face's transformers. Its model must be wrapped in DDP, not FSDP or DeepSpeed.
        compression: a compressor of ``dgc.Compression`` that is used nowhere else.

    Warns:
        RuntimeWarning: (in the first step) the checkpoint comes from a run with a compressor, but lacks its state.
    """
    from transformers import TrainerCallback

    class Compress(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            register(trainer.model_wrapped, kwargs["optimizer"], compression)
            if state.global_step:
                given = args.resume_from_checkpoint
                folder = given if given and os.path.isdir(given) else _folder(args, state)
                _load_if_there(os.path.join(folder, _FILE), compression)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # An evaluation may save the best model. With classic error feedback the model is equal on all ranks.
            if compression.config.steps_ahead and (control.should_save or control.should_evaluate):
                compression.average(unwrapped(kwargs["optimizer"]))

        on_epoch_end = on_step_end

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if compression.engine is not None and not compression.engine.is_equal:
                compression.average(unwrapped(kwargs["optimizer"]))  # a later callback may have asked for the save
            if args.should_save:  # on rank 0, or on one rank of each node
                torch.save(compression.state_dict(), os.path.join(_folder(args, state), _FILE))

    return Compress()


def lightning_callback(compression: DGCCompressor) -> "lightning.Callback":
    """Return a callback for ``lightning.Trainer(callbacks=[...])`` that compresses gradients and saves the state.

    Args:
        compression: a compressor of ``dgc.Compression`` that is used nowhere else.
    """
    import lightning

    class Compress(lightning.Callback):
        state_key = "dgc"  # type: ignore[assignment]
        state: CompressionState | None = None
        loaded: dict[str, Any] | None = None

        def on_train_start(self, trainer: "lightning.Trainer", pl_module: "lightning.LightningModule") -> None:
            if len(trainer.optimizers) != 1:  # the same on all ranks
                raise ConfigError(
                    f"configure_optimizers() returns {len(trainer.optimizers)} optimizers: with lightning_callback() "
                    "one optimizer must own all parameters of the model"
                )
            self.state = register(trainer.strategy.model, trainer.optimizers[0], compression)
            if self.loaded is not None:  # a state was loaded before there was an optimizer
                self.state.load_state_dict(self.loaded)
                self.loaded = None

        def state_dict(self) -> dict[str, Any]:
            return {} if self.state is None else self.state.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

    return Compress()


def _load_if_there(path: str, compression: DGCCompressor) -> None:
    """Load the compressor's state if rank 0 finds the file. Collective."""
    state: dict[str, Any] = {}

    def read() -> dict[str, Any]:
        try:
            state.update(torch.load(path, weights_only=True))
        except Exception as error:  # torch raises all kinds of errors
            raise LayoutError(f"{path} is missing or damaged: take another copy, or an earlier one") from error
        return {}

    if (engine := compression.engine) is None:
        if os.path.exists(path):
            read()
            compression.load_state_dict(state)
    elif gather_values(engine.transport, os.path.exists(path))[0]:
        agree_or_raise(engine.transport, read, "files of the compressor's state", LayoutError)
        compression.load_state_dict(state)


def _folder(args: Any, state: Any) -> str:
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")

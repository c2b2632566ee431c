"""Callbacks for Hugging Face's Trainer and for Lightning: they register DDP's hook, and keep its state in checkpoints.

Accelerate and Fabric take the state that ``dgc.ddp.register`` returns: docs/checkpoints.md shows the lines of all four.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dgc.core.state import write_whole
from dgc.torch.compressor import DGCCompressor
from dgc.torch.ddp import CompressionState, register

if TYPE_CHECKING:
    import lightning
    import transformers

_FILE = "compression.pt"
"""In a checkpoint's directory of Hugging Face's Trainer."""


def trainer_callback(trainer: transformers.Trainer, compression: DGCCompressor) -> transformers.TrainerCallback:
    """A callback for ``trainer.add_callback``: gradients are compressed, and checkpoints hold every rank's state.

    A checkpoint is looked for in ``args.resume_from_checkpoint``, or under its own name in ``args.output_dir``.

    Args:
        trainer: of Hugging Face's transformers; its model must be wrapped in DDP, not in FSDP or DeepSpeed.
        compression: of ``dgc.Compression``, used nowhere else.

    Warns:
        RuntimeWarning: (in the first step) the checkpoint is of a run with a compressor, and its state was not found.
    """
    from transformers import TrainerCallback

    class Compress(TrainerCallback):
        state: CompressionState | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.state = register(trainer.model_wrapped, kwargs["optimizer"], compression)
            if state.global_step:
                given = args.resume_from_checkpoint
                path = Path(given if given and os.path.isdir(given) else _folder(args, state), _FILE)
                self.state.load_state_dict(torch.load(path, weights_only=True) if path.exists() else {})

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert self.state is not None, "training has begun"
            saved = self.state.state_dict()  # on all ranks
            if args.should_save:
                path = Path(_folder(args, state), _FILE)
                write_whole(path, path.with_suffix(".partial"), lambda file: torch.save(saved, file))

    return Compress()


def lightning_callback(compression: DGCCompressor) -> lightning.Callback:
    """A callback for ``lightning.Trainer(callbacks=[...])``: compresses gradients, checkpoints hold every rank's state.

    Args:
        compression: of ``dgc.Compression``, used nowhere else.
    """
    import lightning

    class Compress(lightning.Callback):
        state_key = "dgc"  # type: ignore[assignment]
        state: CompressionState | None = None
        loaded: dict[str, Any] | None = None

        def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
            (optimizer,) = trainer.optimizers
            self.state = register(trainer.strategy.model, optimizer, compression)
            if self.loaded is not None:  # before there was an optimizer
                self.state.load_state_dict(self.loaded)
                self.loaded = None

        def state_dict(self) -> dict[str, Any]:
            return {} if self.state is None else self.state.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

    return Compress()


def _folder(args: Any, state: Any) -> str:
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")

"""Tensors that Horovod's thread can let go of without Python's lock.

When all references but the one of a tensor's Python object are gone, PyTorch lets go of that object, for which it
takes the GIL. At a shutdown Horovod's thread lets go of what it was given while it holds the lock of its queue;
another thread that holds the GIL and waits for that lock, to hand over one more tensor, would wait for ever. A gradient
is safe, since its parameter refers to it; a tensor of our own needs another one that does.
"""

from __future__ import annotations

import torch


def hold(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that refers to ``tensor`` as its gradient; to be kept for as long as Horovod may hold ``tensor``."""
    holder = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)  # of one element's memory
    holder.grad = tensor
    return holder


class Placeholders:
    """The one-element tensors that Horovod reduces in the place of gradients; they are used again and again."""

    def __init__(self) -> None:
        """Make them as they are needed."""
        self._holders: list[torch.Tensor] = []  # of all, also of those that an error left with Horovod
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """A 1.0, (1,) float32, for Horovod to work on in place."""
        if self._free:
            return self._free.pop()
        one = torch.ones(1)
        self._holders.append(hold(one))
        return one

    def give_back(self, placeholder: torch.Tensor, value: float) -> None:
        """Horovod is done with it, and has left ``value`` in it: mostly 1.0, as the average of ones."""
        self._free.append(placeholder if value == 1.0 else placeholder.fill_(1.0))

"""Where a scale is read: at once on the host, and from a GPU without a wait where gradients are handed over."""

import torch

from dgc.torch import scaler as scaler_module


class OnGPU(torch.Tensor):
    """A scale that says it lies on a GPU."""

    is_cuda = True


class Scaler:
    def __init__(self, scale, enabled=True):
        self._scale, self._enabled = scale, enabled

    def get_scale(self):
        return self._scale.item() if self._enabled else 1.0

    def is_enabled(self):
        return self._enabled


def test_a_scale_on_a_gpu_is_read_later(monkeypatch):
    begun = []
    monkeypatch.setattr(scaler_module, "read_later", lambda scale: begun.append(scale) or (lambda: 8.0))
    scale = torch.full((1,), 4.0).as_subclass(OnGPU)
    later = scaler_module.read_scale(Scaler(scale))
    assert callable(later)
    assert begun[0] is scale
    assert later() == 8.0
    assert scaler_module.read_scale(Scaler(scale, enabled=False)) == 1.0
    assert len(begun) == 1


def test_other_scales_are_read_at_once():
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    assert scaler_module.read_scale(scaler) == 16.0
    scaler.scale(torch.zeros(1))
    assert scaler_module.read_scale(scaler) == 16.0

    class Own:
        def get_scale(self):
            return 2.0

    assert scaler_module.read_scale(Own()) == 2.0

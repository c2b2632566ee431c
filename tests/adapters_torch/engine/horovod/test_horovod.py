"""A Horovod that is not ready is an error that says what to do."""

import sys
import types

import pytest

torch = pytest.importorskip("torch")

import dgc.torch as dgc  # noqa: E402
from dgc.torch.engine.horovod.choice import make_transport  # noqa: E402

MISSING = "python -m dgc build-horovod --install"
WITHOUT = types.ModuleType("horovod.torch")
WITHOUT.is_initialized = lambda: True
NOT_READY = {
    "missing": (None, f"importing horovod.torch failed.*{MISSING}"),
    "without torch": (WITHOUT, "built without PyTorch"),
    "not initialised": (None, r"call hvd\.init\(\)"),
}


@pytest.mark.parametrize("name", NOT_READY)
def test_horovod_that_is_not_ready_is_a_config_error(name, monkeypatch):
    module, message = NOT_READY[name]
    if name == "not initialised":
        pytest.importorskip("horovod")
    else:
        monkeypatch.setitem(sys.modules, "horovod.torch", module)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = [
        lambda: make_transport("auto"),
        lambda: dgc.Compression.dgc(model.named_parameters(), optimizer=optimizer),
        lambda: dgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=dgc.Compression.dgc()),
    ]
    for call in calls:
        with pytest.raises(dgc.ConfigError, match=message):
            call()

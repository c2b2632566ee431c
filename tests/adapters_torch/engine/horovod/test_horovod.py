"""A Horovod that is not ready is an error that says what to do."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

NOT_READY = {
    "missing": ("import sys; sys.modules['horovod'] = None", "importing horovod.torch failed"),
    "without torch": (
        "import sys, types; h = types.ModuleType('horovod'); t = types.ModuleType('horovod.torch'); h.torch = t; "
        "sys.modules.update({'horovod': h, 'horovod.torch': t})",
        "built without PyTorch",
    ),
    "not initialised": ("", "call hvd.init()"),
}


CALLS = {
    "transport": "from dgc.torch.engine.horovod.choice import make_transport; make_transport('auto')",
    "way A": (
        "import torch, dgc.torch; model = torch.nn.Linear(2, 2); "
        "dgc.torch.Compression.dgc(model.named_parameters(), optimizer=torch.optim.SGD(model.parameters(), 0.1))"
    ),
}


@pytest.mark.parametrize("name", NOT_READY)
def test_horovod_that_is_not_ready_is_a_config_error(name):
    if name == "not initialised":
        pytest.importorskip("horovod")
    before, message = NOT_READY[name]
    source = f"""
{before}
from dgc.errors import ConfigError
for call in {list(CALLS.values())!r}:
    try:
        exec(call)
    except ConfigError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.count(message) == len(CALLS), done.stdout

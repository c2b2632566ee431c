"""Both adapters have one face: a difference that no framework forces is a mistake."""

import json
import subprocess
import sys

import pytest

import dgc

FRAMEWORKS = {"torch": "dgc.torch", "tensorflow": "dgc.tensorflow", "keras": "dgc.tensorflow.keras"}

SHOWN = """
import inspect, json, sys
import {module} as dgc
from dgc.errors import DGCError

def arguments(function):
    return [[p.name, p.kind.name, repr(p.default)] for p in inspect.signature(function).parameters.values()]

compressor = dgc.DGCCompressor
names = [n for n in dir(compressor) if not n.startswith("_")]
print(json.dumps(dict(
    exports=sorted(dgc.__all__),
    missing=[n for n in dgc.__all__ if not hasattr(dgc, n)],
    errors=[n for n in dgc.__all__ if isinstance(getattr(dgc, n), type) and issubclass(getattr(dgc, n), DGCError)],
    listed=dir(dgc),
    compression=sorted(dir(dgc.Compression)),
    options=inspect.getdoc(dgc.Compression.dgc),
    compressor=names,
    constructors={{n: arguments(f) for n in dir(dgc.Compression) if callable(f := getattr(dgc.Compression, n))}},
    signatures={{n: arguments(getattr(compressor, n)) for n in names if callable(getattr(compressor, n))}},
    constructor=arguments(compressor),
    momentum=arguments(dgc.DGCMomentum),
    paddles_name=dgc.DGCMomentumOptimizer is dgc.DGCMomentum,
    loaded=[m for m in ("torch", "tensorflow") if m in sys.modules],
)))
"""


@pytest.fixture(scope="module")
def faces():
    found = {}
    for name, module in FRAMEWORKS.items():
        source = SHOWN.format(module=module)
        shown = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
        assert shown.returncode == 0, shown.stderr[-3000:]
        found[name] = json.loads(shown.stdout.splitlines()[-1])
    return found


ONLY = {
    # What the frameworks force; docs/tensorflow.md has the reasons.
    "torch": {
        "RankState",
        "ZeroRedundancyOptimizer",
        "broadcast_parameters",
        "ddp",
        "fuse_optimizer",
        "fuse_step",
        "is_fused_optimizer",
        "load_checkpoint",
        "save_checkpoint",
    },
    "tensorflow": {"DistributedGradientTape"},
    "keras": {"callbacks", "load_model"},
}


def test_exports(faces):
    shared = {name: set(face["exports"]) - ONLY[name] for name, face in faces.items()}
    assert shared["torch"] == shared["tensorflow"] == shared["keras"]
    assert [face["missing"] for face in faces.values()] == [[], [], []]
    assert all(face["listed"] == face["exports"] for face in faces.values()), "dir() shows what is public"
    assert len(faces["keras"]["errors"]) == 7


def test_the_package_alone_names_the_adapters():
    with pytest.raises(AttributeError, match="import the adapter of your framework"):
        _ = dgc.Compression


def test_each_loads_its_own_framework(faces):
    assert faces["torch"]["loaded"] == ["torch"]
    assert faces["keras"]["loaded"] == ["tensorflow"]


def test_compression(faces):
    assert faces["torch"]["compression"] == faces["tensorflow"]["compression"] == faces["keras"]["compression"]
    assert faces["torch"]["options"] == faces["tensorflow"]["options"]


def test_constructors_are_the_same(faces):
    constructors = [face["constructors"] for face in faces.values()]
    assert constructors[0] == constructors[1] == constructors[2]
    assert [a[0] for a in constructors[0]["dgc"]][:3] == ["parameters", "optimizer", "sparsity"]


METHODS_ONLY_IN_TENSORFLOW = {"adopt", "adoption", "claim", "optimizer", "serves_horovod", "variable_names"}
"""A graph is built more than once, and a tape wrapped anew in each step."""


def test_compressors(faces):
    torch, tensorflow = faces["torch"], faces["tensorflow"]
    assert set(tensorflow["compressor"]) - set(torch["compressor"]) == METHODS_ONLY_IN_TENSORFLOW
    # torch.distributed's groups of ranks serve PyTorch alone.
    assert set(torch["compressor"]) - set(tensorflow["compressor"]) == {"use_job"}
    assert torch["constructor"] == tensorflow["constructor"]
    ours, theirs = torch["signatures"], tensorflow["signatures"]
    differing = sorted(n for n in ours if n in theirs and ours[n] != theirs[n])
    assert differing == ["bind"]
    # named_parameters against variables; `stock`: Horovod will build an optimizer of its own from torch's.
    assert [a[1:] for a in ours["bind"]][:4] == [a[1:] for a in theirs["bind"]]
    assert [a[0] for a in ours["bind"]] == ["self", "named_parameters", "optimizer", "process_set", "stock"]


def test_dgc_momentum_has_paddles_name_too(faces):
    assert [face["paddles_name"] for face in faces.values()] == [True, True, True]


def test_dgc_momentum(faces):
    torch = [a for a in faces["torch"]["momentum"] if a[0] not in ("params", "loss_scale")]
    tensorflow = [a for a in faces["tensorflow"]["momentum"] if not a[0].startswith("parameter_")]
    assert [(name, default) for name, _, default in torch] == [(name, default) for name, _, default in tensorflow]

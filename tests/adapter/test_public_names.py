"""The public names of both adapters are the same: a difference that no framework forces is a mistake."""

import json
import subprocess
import sys

import pytest

import dgc

SHOWN = """
import importlib, inspect, json, sys
from dgc.errors import DGCError

def arguments(function):
    return [[p.name, p.kind.name, repr(p.default)] for p in inspect.signature(function).parameters.values()]

def face(dgc):
    compressor, made = dgc.DGCCompressor, dgc.Compression
    names = [n for n in dir(compressor) if not n.startswith("_")]
    exported = {n: getattr(dgc, n, None) for n in sorted(dgc.__all__)}
    return dict(
        exports=list(exported),
        missing=[n for n, value in exported.items() if value is None],
        errors=[n for n, value in exported.items() if isinstance(value, type) and issubclass(value, DGCError)],
        listed=dir(dgc),
        compression=sorted(dir(made)),
        options=inspect.getdoc(made.dgc),
        compressor=names,
        constructors={n: arguments(f) for n in dir(made) if callable(f := getattr(made, n))},
        signatures={n: arguments(getattr(compressor, n)) for n in names if callable(getattr(compressor, n))},
        constructor=arguments(compressor),
        momentum=arguments(dgc.DGCMomentum),
        paddles_name=dgc.DGCMomentumOptimizer is dgc.DGCMomentum,
        loaded=[m for m in ("torch", "tensorflow") if m in sys.modules],
    )

print(json.dumps([face(importlib.import_module(name)) for name in sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def faces():
    found = []
    for modules in (["dgc.torch"], ["dgc.tensorflow", "dgc.tensorflow.keras"]):
        command = [sys.executable, "-c", SHOWN, *modules]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        assert shown.returncode == 0, shown.stderr[-3000:]
        found += json.loads(shown.stdout.splitlines()[-1])
    return dict(zip(("torch", "tensorflow", "keras"), found, strict=True))


ONLY = {
    # What the frameworks force; docs/tensorflow.md has the reasons.
    "torch": {"RankState", "ZeroRedundancyOptimizer", "broadcast_parameters", "ddp", "fuse_optimizer", "fuse_step"}
    | {"is_fused_optimizer"},
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


METHODS_ONLY_IN_TENSORFLOW = {"adopt", "adoption", "claim", "names", "open_engine", "optimizer", "serves_horovod"}
METHODS_ONLY_IN_TENSORFLOW |= {"variable_names"}
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

"""What constructors of ``Compression`` show is what the core takes, and a type checker finds mistakes by it."""

import ast
import dataclasses
import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from documented import own_names, shown

import dgc
from dgc.adapter import signatures
from dgc.adapter.compressor import ADAPTER_OPTIONS
from dgc.core.codecs import INDEX_CODECS, VALUE_CODECS, register_codec
from dgc.core.compressors import compressor_class, make_config

INTERNAL = {"error_feedback"}
"""False is for control experiments."""
TENSORS = ["self", "parameters", "optimizer"]
ADAPTERS = {"transport": "auto", "loss_scale": 1.0, "process_set": None}


def plain(text):
    return re.sub(r"\s+", " ", text).strip()


def sentences(cls):
    """The text below each field of a class's own body, by the field's name."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    return {
        field.target.id: plain(text.value.value)
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def shared(declared):
    """The names of a constructor's other options, of a TypedDict; empty where all are listed."""
    others = [p for p in declared.parameters.values() if p.kind is p.VAR_KEYWORD]
    if not others:
        return set()
    return set(getattr(signatures, re.fullmatch(r"Unpack\[(\w+)\]", others[0].annotation).group(1)).__annotations__)


def arguments(name):
    """The sentences of a constructor's docstring, by argument."""
    text = inspect.getdoc(getattr(signatures.Constructors, name))
    section = re.search(r"Args:\n(.*?)\n\n", text, re.DOTALL).group(1)
    return {n: plain(t) for n, t in re.findall(r"^    (\*{0,2}\w+): (.*?)(?=^    \S|\Z)", section + "\n", re.M | re.S)}


each = pytest.mark.parametrize("name", own_names())


@each
def test_all_options_are_declared_and_explained(name):
    row, declared = compressor_class(name), inspect.signature(getattr(signatures.Constructors, name))
    explicit = [n for n, p in declared.parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert list(declared.parameters)[:3] == TENSORS
    taken = {*row.common_options(), *(f.name for f in dataclasses.fields(row.Options)), *ADAPTER_OPTIONS} - INTERNAL
    others = shared(declared)
    assert {*explicit, *others} == taken
    assert not {*explicit} & {*others}
    assert [a for a in arguments(name) if a != "**options"] == [*TENSORS[1:], *explicit]


@each
def test_defaults_are_those_of_the_core(name):
    config = make_config({}, algorithm=name)
    for n, p in inspect.signature(getattr(signatures.Constructors, name)).parameters.items():
        if p.kind is not p.KEYWORD_ONLY:
            continue
        default = ADAPTERS[n] if n in ADAPTERS else getattr(config.own, n, getattr(config, n, None))
        assert (p.default,) == default if n == "sparsity" else p.default == default, n
    text = arguments(name).get("**options", "")
    for n, value in (("small", '"float32"'), ("momentum", "0"), ("momentum_masking", "False")):
        if n in shared(inspect.signature(getattr(signatures.Constructors, name))):
            assert repr(getattr(config, n)).replace("'", '"') in (value, f"{value}.0")
            assert re.search(rf"``{n}`` (is )?{value}", text), n


@each
def test_types_and_sentences_of_its_own_options_are_those_of_its_class(name):
    row, declared = compressor_class(name), inspect.signature(getattr(signatures.Constructors, name)).parameters
    texts, told = sentences(row.Options), arguments(name)
    for field in dataclasses.fields(row.Options):
        assert declared[field.name].annotation == field.type
        assert told[field.name] == texts[field.name]


def test_shared_options_are_told_alike_everywhere():
    told = arguments("dgc")
    declared = inspect.signature(signatures.Constructors.dgc).parameters
    for name, hint in signatures.EntryOptions.__annotations__.items():
        assert name in told
        assert declared[name].annotation == getattr(hint, "__forward_arg__", hint), name
    for name in own_names():
        for option in {"sparsity", "rampup_step", "indices", "values"} & arguments(name).keys():
            assert arguments(name)[option] == told[option]


@pytest.mark.parametrize(
    ("hint", "codecs"), [(signatures.IndexCodec, INDEX_CODECS), (signatures.ValueCodec, VALUE_CODECS)]
)
def test_codecs(hint, codecs):
    module = register_codec.__module__  # not those of other tests
    ours = [name for name, codec in codecs.items() if type(codec).__module__ == module]
    assert set(typing.get_args(hint)) == set(ours)


def test_help_reads_like_a_plain_method():
    assert str(inspect.signature(signatures.Constructors.topk)).endswith(
        "**options: 'Unpack[EntryOptions]') -> 'Compressor'"
    )
    assert signatures.Constructors.topk.__doc__.startswith("Send the entries above a threshold")


def test_dgc_has_few_options():
    declared = inspect.signature(signatures.Constructors.dgc).parameters
    assert len([p for p in declared.values() if p.kind is p.KEYWORD_ONLY]) <= 23


# -- a type checker ----------------------------------------------------------------------------------------------------

SETUP = """
import horovod.torch as hvd
import torch
import torch.distributed as dist
import dgc.torch as dgc
from torch.nn.parallel import DistributedDataParallel

model: torch.nn.Module = torch.nn.Linear(3, 3)
epochs = 9
loader: list[torch.Tensor] = []
"""

SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"

USED = """
optimizer.synchronize()
scaler = torch.amp.GradScaler("cpu")
scaler.unscale_(optimizer)
with optimizer.skip_synchronize():
    scaler.step(optimizer)
optimizer.set_backward_passes_per_step(2)
print(optimizer.compression.stats.last.ratio, optimizer.compression.describe()["step"])
torch.optim.lr_scheduler.StepLR(optimizer, 3)
for dense in (None, dgc.Compression.none, dgc.Compression.fp16, hvd.Compression.fp16):
    dgc.DistributedOptimizer(optimizer, compression=dense, op=hvd.Average)
compression = dgc.Compression.topk(
    model.named_parameters(), optimizer, sparsity=[0.9, 0.99], rampup_step=9, exclude="*.bias", loss_scale=scaler
)
dgc.Compression.qsgd(bits=8, seed=3, min_numel=64, transport="mpi")
dgc.save_checkpoint("here", model=model, optimizer=optimizer, compression=compression)
state = dgc.ddp.register(DistributedDataParallel(model), optimizer, dgc.Compression.onebit(means="row", momentum=0.9))


def others(model: torch.nn.Module) -> torch.optim.Optimizer:
    adam = dgc.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    adam.synchronize()
    adamw = torch.optim.AdamW(model.parameters())
    adamw = dgc.DistributedOptimizer(adamw, compression=dgc.Compression.dgc(steps=100))
    any_ = dgc.DistributedOptimizer(torch.optim.RMSprop(model.parameters()))
    any_.synchronize()
    adamw.synchronize()
    return adamw


try:
    optimizer.step()
except (dgc.StallError, dgc.LayoutError):
    pass
"""

MISTAKES = {
    "dgc.Compression.dgc(sparcity=0.999)": "sparcity",
    'dgc.Compression.topk(sparsity="a lot")': "sparsity",
    "dgc.Compression.powersgd()": "powersgd",
    'dgc.DistributedOptimizer(optimizer, compression="dgc")': "DistributedOptimizer",
    'dgc.Compression.dgc(values="int4")': "values",
    "dgc.Compression.qsgd(momentum=0.9)": "momentum",
    'dgc.Compression.strom(min_numel="many")': "min_numel",
    "dgc.DistributedOptimizer(optimizer, compression=dgc.Compression.topk)": "DistributedOptimizer",
    "dgc.DistributedOptimizer(optimizer, backward_passes=2)": "DistributedOptimizer",
}


@pytest.mark.slow
def test_mypy_accepts_a_users_script_and_finds_mistakes(tmp_path):
    """README's lines, with an optimizer that a variable of SGD's type holds: no error; each mistake is found."""
    assert (Path(dgc.__file__).parent / "py.typed").exists()
    blocks = [block for block in shown("../README.md", "Turn it on") if "dgc.torch" in block]
    assert [block for block in blocks if "dgc.DistributedOptimizer(" in block]
    for i, block in enumerate(blocks):
        made = "" if "optimizer = torch.optim" in block else SGD
        lines = "\n".join(line for line in block.splitlines() if not line.startswith("import"))
        used = USED if "dgc.DistributedOptimizer(" in block else ""
        (tmp_path / f"used{i}.py").write_text(f"{SETUP}{made}{lines}\n{used}")
    (tmp_path / "mistaken.py").write_text(SETUP + SGD + "\n".join(MISTAKES))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--ignore-missing-imports",
        "--follow-imports=silent",
        "--no-error-summary",
    ]
    # The package as an installed one; a cache outside of the folder that mypy looks at.
    environment = {**os.environ, "MYPYPATH": str(Path(dgc.__file__).parent.parent)}
    files = sorted(p.name for p in tmp_path.glob("*.py"))
    found = subprocess.run(
        [*command, *files], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    errors = [line for line in found.stdout.splitlines() if ": error: " in line]
    assert found.stderr == ""
    assert [e for e in errors if not e.startswith("mistaken.py")] == []
    first = len((SETUP + SGD).splitlines()) + 1
    for number, (line, word) in enumerate(MISTAKES.items(), first):
        told = [e for e in errors if e.startswith(f"mistaken.py:{number}: ")]
        assert told, (line, errors)
        assert word in told[0]
    assert len({e.split(":")[1] for e in errors}) == len(MISTAKES)  # and nothing else is one

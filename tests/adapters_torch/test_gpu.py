"""Torch tensors on a real GPU through the engine: equal to the CPU, on torch's streams, without hidden waits."""

import functools

import pytest
import torch

from dgc.core.compressors import make_config
from dgc.errors import ConfigError, LayoutError
from dgc.torch.engine import Engine
from dgc.torch.tensors import DeviceTensors
from dgc.transport.local import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

SHAPES = {"a": (300, 400), "b": (300,), "c": (128, 128)}


@pytest.fixture(autouse=True)
def _kernels():
    from dgc.core.kernels import choose_kernels

    try:
        choose_kernels("gpu:0")
    except ConfigError as error:
        pytest.skip(str(error))


def make_parameters(dtype, device):
    generator = torch.Generator().manual_seed(0)
    made = {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}
    return {n: p.to(device).requires_grad_() for n, p in made.items()}


def train(device, dtype, ranks=2, steps=6, around=None, algorithm="dgc", **options):
    """Returns per rank the parameters (on the CPU) and the engine's tensors."""
    common = {"sparsity": 0.99, "momentum": 0.9} if algorithm == "dgc" else {}
    config = make_config({"min_numel": 64, **common, **options}, algorithm=algorithm)

    def one_rank(transport):
        parameters = make_parameters(dtype, device)
        engine = Engine(list(parameters.items()), config, transport, optimizer=None)
        generator = torch.Generator().manual_seed(transport.rank + 1)
        for step in range(steps):
            drawn = [(torch.randn(p.shape, generator=generator) * 0.1).to(dtype) for p in parameters.values()]
            gradients = [g.to(device) for g in drawn]
            exchange = functools.partial(submit_all, engine, gradients)
            exchange() if around is None else around(step, exchange)
            with torch.no_grad():
                for p, g in zip(parameters.values(), gradients, strict=True):
                    p -= 0.1 * g
        engine.close()
        return [p.detach().cpu() for p in parameters.values()], engine._tensors

    return run_ranks(ranks, one_rank)


def submit_all(engine, gradients):
    for i, g in reversed(list(enumerate(gradients))):
        gradients[i] = engine.submit(i, g)
    engine.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"weight_decay": 0.01}, {"rampup_begin_step": 3}, {"values": "int8"}, {"sparsity": 0.5},
        {"algorithm": "topk"},
    ],
    ids=str,
)  # fmt: skip
def test_training_equals_the_cpu(dtype, options):
    got, wanted = train("cuda", dtype, **options), train("cpu", dtype, **options)
    assert isinstance(got[0][1], DeviceTensors)
    for (parameters, _), (expected, _) in zip(got, wanted, strict=True):
        torch.testing.assert_close(parameters, expected, rtol=0, atol=0)


def test_torch_sees_no_synchronisation():
    """Torch's own check of synchronising calls, on one rank (which is one thread), once everything is warm."""

    def checked(step, exchange):
        torch.cuda.set_sync_debug_mode("error" if step >= 3 else "default")
        try:
            exchange()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    train("cuda", torch.float32, ranks=1, around=checked)


@pytest.mark.parametrize("side", [False, True])
def test_slow_gradients_are_waited_for_on_the_device(side):
    """Gradients that are still being computed when they are submitted, on the default or on a side stream."""
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    parameters = make_parameters(torch.float32, "cuda")
    config = make_config({"min_numel": 64, "sparsity": 0.99})

    def one_rank(transport):
        engine = Engine(list(parameters.items()), config, transport, optimizer=None)
        with torch.cuda.stream(stream):
            for step in range(4):
                values = [torch.full(p.shape, float(step + 1), device="cuda") for p in parameters.values()]
                gradients = [torch.zeros_like(p) for p in parameters.values()]
                torch.cuda.synchronize()
                torch.cuda._sleep(200_000_000)
                for g, x in zip(gradients, values, strict=True):
                    g.copy_(x)  # runs long after the submission
                submit_all(engine, gradients)
                # Read on the same stream at once: it has to wait for the exchange.
                dense = gradients[1].clone()
                sent = [int((g != 0).sum()) for g in gradients]
                assert (dense == step + 1).all()
                assert sent[0] == 1200
                assert sent[2] == 163
        engine.close()

    run_ranks(1, one_rank)


def test_strided_and_moved_gradients():
    parameters = make_parameters(torch.float32, "cuda")
    config = make_config({"min_numel": 64, "sparsity": 0.0, "momentum_masking": False, "values": "float32"})

    def one_rank(transport):
        engine = Engine(list(parameters.items()), config, transport, optimizer=None)
        reverse = [torch.randn(p.shape[::-1], device="cuda") for p in parameters.values()]
        gradients = [r.permute(*reversed(range(r.dim()))) for r in reverse]
        results = [torch.empty(g.shape, device="cuda") for g in gradients]
        for i in (2, 1, 0):
            results[i] = engine.submit(i, gradients[i])
        engine.finish()
        torch.testing.assert_close(results, gradients)
        with pytest.raises(LayoutError, match="on cpu"):
            engine.submit(0, gradients[0].cpu())
        engine.close()

    run_ranks(1, one_rank)

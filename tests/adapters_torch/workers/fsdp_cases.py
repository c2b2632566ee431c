"""FSDP2 in each of two nodes of two ranks, our exchange between the nodes; Horovod and mpi4py cannot be imported."""

import contextlib
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from adapters_torch.torchrun_tools import EXACT, assert_close, digest, gathered, loss_of, on_every_rank
from adapters_torch.workers.tensors import as_bytes
from ddp_tools import adamw, sgd
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from worker_tools import SkipCase, case, close_later

import dgc.torch as dgc
from dgc.core.config import bias_correction
from dgc.torch.tensors import local

MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


class Net(nn.Module):
    """One shard of the last layer is empty on the second rank of each node."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(20, 63), nn.Tanh(), nn.Linear(63, 64), nn.Tanh())
        self.out, self.one = nn.Linear(64, 5), nn.Linear(64, 1)

    def forward(self, x):
        return self.out(h := self.layers(x)) + self.one(h)


def make_model(over="shard", seed=0, net=Net, **options):
    model = net(seed)
    where = MESH if over is None else MESH[over]
    for layer in model.layers[::2]:
        fully_shard(layer, mesh=where, **options)
    return fully_shard(model, mesh=where, **options)


def wrap(model, optimizer=None, group="replicate", **options):
    compression = close_later(dgc.Compression.dgc(**options))
    optimizer = dgc.DistributedOptimizer(
        optimizer or sgd(model),
        model.named_parameters(),
        compression=compression,
        group=None if group is None else MESH[group].get_group(),
    )
    return optimizer, compression


def clip(model, optimizer):
    synchronizes = hasattr(optimizer, "synchronize")
    if synchronizes:
        optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    with optimizer.skip_synchronize() if synchronizes else contextlib.nullcontext():
        optimizer.step()


def train(optimizer, model, steps, start=0, passes=1, step_of=None):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        for i in range(passes):
            model.set_requires_gradient_sync(i == passes - 1)
            loss_of(model, passes * step + i).backward()
        if step_of is None:
            optimizer.step()
        else:
            step_of(model, optimizer)


def shards(model):
    return [p.to_local().detach() for p in model.parameters()]


def assert_identical(model):
    one, two, *others = gathered(digest(shards(model)))
    assert [one, two] == others, "replicas differ"
    assert one != two, "shards do not differ"


@contextlib.contextmanager
def reference():
    """Skip the case where PyTorch's own HSDP does not run over Gloo, as with 2.7."""
    try:
        yield
    except RuntimeError as error:
        if "Cannot use ReduceOp.AVG with Gloo" not in str(error):
            raise
        raise SkipCase("PyTorch's HSDP does not run over Gloo") from None


def equals_hsdp(make_optimizer=sgd, steps=20, how=None, compression=None, training=train, **options):
    """Train twice: ours over one-dimensional shards, and torch's own over the whole mesh."""
    model, expected = make_model(**(how or {})), make_model(None, **(how or {}))
    optimizer, _compression = wrap(model, make_optimizer(model), **{**EXACT, **(compression or {})})
    training(optimizer, model, steps, **options)
    with reference():
        training(make_optimizer(expected), expected, steps, **options)
    assert_close(shards(model), shards(expected))
    assert_identical(model)


@case
def training_equals_hsdp_at_sparsity_0():
    equals_hsdp()
    for options in ({"momentum": 0.0}, {}, {"sparsity": 0.9, "rampup_begin_step": 20}):
        equals_hsdp(adamw, compression=options)


@case
def the_first_moment_goes_from_a_dense_run_into_a_compressed_one_and_on():
    model = make_model()
    options = {"sparsity": 0.9, "min_numel": 64, "rampup_begin_step": 4, "error_feedback": "classic"}
    optimizer, compression = wrap(model, adamw(model), **options)
    train(optimizer, model, 10)
    assert_identical(model)
    u = compression.state_dict(own=True)["parameters"]
    saved = optimizer.state_dict()["state"]
    for i, name in enumerate(n for n, _ in model.named_parameters()):
        if "v" in u[name]:
            moment = saved[i]["exp_avg"].to_local().view(-1)
            limit = 0.1 / (0.001 * (1 - 0.81 / 0.999)) ** 0.5 * saved[i]["exp_avg_sq"].to_local().view(-1).sqrt()
            expected = (u[name]["u"] * bias_correction(0.9, 10)).clamp(-limit, limit)
            torch.testing.assert_close(moment, expected, rtol=1e-5, atol=1e-8)


@case
def unused_and_frozen_layers_are_left_alone():
    class Spare(Net):
        def __init__(self, seed):
            super().__init__(seed)
            self.never = nn.Linear(8, 8)

    def freezing(optimizer, model, steps):
        for step in range(steps):
            model.layers[0].requires_grad_(not 6 <= step < 14)
            train(optimizer, model, 1, step)

    equals_hsdp(how={"net": Spare}, training=freezing)


@case
def accumulation_clipping_and_mixed_precision_equal_hsdp():
    equals_hsdp(passes=2)
    equals_hsdp(step_of=clip, compression={"momentum": 0.0})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    equals_hsdp(steps=5, how={"mp_policy": policy})


@case
def replicas_are_identical_after_60_sparse_steps():
    model = make_model()
    assert min(p.numel() for p in shards(model)) == 0 or dist.get_rank() % 2 == 0
    optimizer, compression = wrap(model, sparsity=0.99, min_numel=64)
    before = loss_of(model, 999).item()
    train(optimizer, model, 60)
    assert_identical(model)
    assert loss_of(model, 999).item() < before
    assert compression.stats.last.bytes_sent < 0.1 * compression.stats.last.dense_bytes
    assert compression.describe()["transport"] == "torch.distributed"


@case
def a_scaler_that_overflows_on_one_rank():
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    optimizer, compression = wrap(model, sparsity=0.9, loss_scale=scaler)
    for step in range(6):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, step))
        (loss * float("inf") if step == 3 and dist.get_rank() == 1 else loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert compression.stats.refused_steps == 1
    assert_identical(model)


@case
def a_rank_whose_shards_are_all_empty():
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(1, 1), mesh=MESH["shard"])
    optimizer, _compression = wrap(model, sparsity=0.9)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 1), 1.0 + step + dist.get_rank())).square().mean().backward()
        optimizer.step()
    one, two, *others = gathered(digest(shards(model)))
    assert [one, two] == others


@case
def gradients_that_were_changed_before_synchronize():
    model = make_model()
    optimizer, _compression = wrap(model, sparsity=0.9)
    train(optimizer, model, 2)

    def clip_at_once(model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    on_every_rank(dgc.DGCError, "while it was exchanged", lambda: train(optimizer, model, 1, step_of=clip_at_once))


def shared_folder():
    return gathered(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]


def save_and_load(folder, model, optimizer, save, **more):
    weights, state = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": state, **more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        (dcp.save if save else dcp.load)(content, checkpoint_id=folder)
    if not save:
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


@case
def a_resumed_run_continues_bit_for_bit():
    folder = shared_folder()
    for make_optimizer, options in ((sgd, {}), (adamw, {"momentum": 0.0})):
        straight, resumed = make_model(), make_model(seed=1)
        optimizer, compression = wrap(straight, make_optimizer(straight), sparsity=0.9, min_numel=64, **options)
        train(optimizer, straight, 5)
        optimizer.zero_grad()
        compression.average(optimizer)
        before = as_bytes(compression.state_dict())
        save_and_load(folder, straight, optimizer, save=True, compression=dgc.RankState(compression, optimizer))
        assert as_bytes(compression.state_dict()) == before
        train(optimizer, straight, 5, start=5)
        compression.close()
        optimizer, compression = wrap(resumed, make_optimizer(resumed), sparsity=0.9, min_numel=64, **options)
        save_and_load(folder, resumed, optimizer, save=False, compression=dgc.RankState(compression, optimizer))
        assert as_bytes(compression.state_dict()) == before
        train(optimizer, resumed, 5, start=5)
        assert digest(shards(resumed)) == digest(shards(straight))
        compression.close()


@case(from_dense=(False, True))
def a_checkpoint_without_the_compressors_state_carries_the_momentum(from_dense):
    folder, expected = shared_folder(), None
    for save in (True, False):
        dense = save and from_dense
        model = make_model(None if dense else "shard", seed=int(not save))
        if dense:
            optimizer, compression = sgd(model), None
        else:
            optimizer, compression = wrap(model, sparsity=0.9, min_numel=64)
        if save:
            with reference() if dense else contextlib.nullcontext():
                train(optimizer, model, 3)
            optimizer.zero_grad()
        if compression is not None:
            compression.average(optimizer)
        save_and_load(folder, model, optimizer, save)
        if save:
            expected = optimizer.state_dict()["state"]
        else:
            found = optimizer.state_dict()["state"]
            for i, entry in expected.items():
                momentum = entry["momentum_buffer"].full_tensor()
                assert momentum.any()
                assert torch.equal(found[i]["momentum_buffer"].full_tensor(), momentum), i
            train(optimizer, model, 3, start=3)
        if compression is not None:
            compression.close()


@case
def shards_are_broadcast_among_replicas():
    model = make_model(seed=dist.get_rank() // 2)
    optimizer, _ = wrap(model)
    on_every_rank(dgc.ConfigError, r"dgc\.torch\.broadcast_parameters", lambda: train(optimizer, model, 1))
    model = make_model(seed=dist.get_rank() // 2)
    optimizer, _compression = wrap(model)
    dgc.broadcast_parameters(model.state_dict(), root_rank=1, group=MESH["replicate"].get_group())
    assert digest(shards(model)) == digest(shards(make_model(seed=1)))
    train(optimizer, model, 2)
    assert_identical(model)


@case
def bad_input():
    twice = "averaged once more with ranks"
    on_every_rank(dgc.ConfigError, twice, lambda: wrap(make_model(None)))  # HSDP
    on_every_rank(dgc.ConfigError, twice, lambda: wrap(make_model(), group=None))
    on_every_rank(dgc.ConfigError, twice, lambda: wrap(make_model(), group="shard"))


@case
def parameters_outside_of_fully_shard_are_refused():
    model = Net()
    for layer in (*model.layers[::2], model.one):
        fully_shard(layer, mesh=MESH["shard"])
    text = r"'out\.weight', 'out\.bias': no fully_shard\(\) holds these"
    on_every_rank(dgc.ConfigError, text, lambda: wrap(model))
    plain, where = sgd(model), MESH["replicate"].get_group()
    text = r"^a parameter of shape \(5, 64\), a parameter of shape \(5,\): no fully_shard"
    unnamed = lambda: dgc.DistributedOptimizer(plain, compression=dgc.Compression.dgc(), group=where)  # noqa: E731
    on_every_rank(dgc.ConfigError, text, unnamed)
    model.out.requires_grad_(False)
    optimizer, _compression = wrap(model)
    loss_of(model, 0).backward()
    optimizer.step()


@case
def nodes_of_one_rank_may_have_parameters_outside_of_fully_shard():
    """They are as whole there as the shards."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    model, expected = Net(), DistributedDataParallel(Net())
    for layer in model.layers[::2]:
        fully_shard(layer, mesh=mesh["shard"])
    plain = sgd(expected)
    compression, group = close_later(dgc.Compression.dgc(**EXACT)), mesh["replicate"].get_group()
    optimizer = dgc.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression, group=group)
    for step in range(10):
        for net, steps in ((model, optimizer), (expected, plain)):
            steps.zero_grad()
            loss_of(net, step).backward()
            steps.step()
    assert_close([local(p).detach() for p in model.parameters()], [p.detach() for p in expected.parameters()])


@case
def join_is_refused():
    model = make_model()
    optimizer, compression = wrap(model, sparsity=0.9)
    train(optimizer, model, 1)
    on_every_rank(dgc.ConfigError, "join.* FSDP's shards", lambda: dgc.join(compression))


@case(late=(False, True))
def nodes_step_ahead_with_adamw(late):
    """Each shard has its own shared values; the whole model is equal on all ranks after the last of the steps."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"error_feedback": "step-ahead", "late": True} if late else {}
    optimizer, compression = wrap(model, optimizer, steps=40, min_numel=64, **options)
    assert compression.config.steps_ahead
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step == 20:
            own = gathered(digest(compression.engine.ahead.shared))
            assert own[:2] == own[2:], "shared values differ between nodes"
            whole = gathered(digest([p.full_tensor() for p in model.parameters()]))
            assert whole[0] == whole[1] != whole[2], "each node has its own parameters"
    assert len(set(gathered(digest([p.full_tensor() for p in model.parameters()])))) == 1
    assert losses[-1] < 0.9 * losses[0]

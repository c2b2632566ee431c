"""On real ranks: DGCMomentum against Paddle's algorithm in NumPy, and against torch's SGD."""

import copy

import horovod.torch as hvd
import numpy as np
import torch
from adapters_torch.workers.tensors import assert_bits_equal, assert_replicas_identical, raises, through_file, twin
from documented import shown
from paddle_oracle import PaddleOracle
from torch import nn
from worker_tools import case, close_later

import dgc.torch as dgc
from dgc.errors import ConfigError, DGCError, LayoutError
from dgc.torch import L1Decay, L2Decay

SHAPES = [(16, 1024), (16384,), (127, 129), (64, 3), (30,)]  # the third has 16383 elements
COMPRESSED = 2 * 16384


def parameters(shapes=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes or SHAPES]


def gradient(p, step, i, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * i + 100_000 * rank)
    return (0.1 * torch.randn(p.shape, generator=generator)).to(p.dtype)


def train(optimizer, own, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        sum((p * gradient(p, step, i, hvd.rank())).sum() for i, p in enumerate(own)).backward()
        optimizer.step()


def oracle_train(oracle, own, steps, start=0):
    for step in range(start, start + steps):
        oracle.step(
            [[gradient(p, step, i, rank).numpy().ravel() for i, p in enumerate(own)] for rank in range(hvd.size())]
        )


def assert_close(own, oracle, bound=2e-6):
    for i, (p, expected) in enumerate(zip(own, oracle.parameters, strict=True)):
        worst = np.abs(p.detach().numpy().ravel() - expected).max() / np.abs(expected).max()
        assert worst <= bound, f"tensor {i} differs by {worst:.2e}"


def make(own, **options):
    given = {"learning_rate": 0.1, "momentum": 0.9, "rampup_begin_step": 0, **options}
    optimizer = dgc.DGCMomentum(own, **given)
    close_later(optimizer.compression)
    return optimizer


def oracle_of(own, **options):
    options = {"lr": 0.1, "momentum": 0.9, "begin": 0, **options}
    return PaddleOracle([p.detach().numpy().copy() for p in own], hvd.size(), **options)


def differs():
    """0 on all ranks but the last."""
    return int(hvd.rank() == hvd.size() - 1)


DECAYS = {"no decay": (0.0, 0.0), "l1": (1e-3, 0.0), "l2": (0.0, 1e-2)}


@case(nesterov=(False, True), decay=DECAYS, clip=(None, 1.5))
def equals_paddle_from_before_the_rampup_to_its_end(nesterov, decay, clip):
    own, (l1, l2) = parameters(), DECAYS[decay]
    optimizer = make(
        own,
        rampup_begin_step=3,
        rampup_step=4,
        sparsity=[0.75, 0.99],
        use_nesterov=nesterov,
        regularization=L1Decay(l1) if l1 else L2Decay(l2) if l2 else None,
        local_grad_clip_norm=clip,
        num_trainers=hvd.size() if clip else None,
    )
    both = {"nesterov": nesterov, "clip": clip, "l1": [l1] * len(own), "l2": [l2] * len(own)}
    oracle = oracle_of(own, begin=3, rampup_step=4, sparsity=(0.75, 0.99), **both)
    for start in range(0, 9, 3):
        train(optimizer, own, 3, start)
        oracle_train(oracle, own, 3, start)
        assert_close(own, oracle)
    assert_replicas_identical(own)
    for i in range(2):
        v = optimizer.compression.state_dict(own=True)["parameters"][f"group0.{i}"]["v"]
        np.testing.assert_allclose(v.numpy().ravel(), oracle.v[hvd.rank()][i], atol=2e-5)
    norm = gradient(own[0], 0, 0, 0).norm().item()
    assert norm > 1.5 * hvd.size() ** 0.5, "clipping does not bite"


@case
def entries_sent_follow_the_rampup():
    own = parameters()
    optimizer = make(own, rampup_begin_step=2, rampup_step=5, sparsity=[0.75, 0.9375, 0.984375, 0.996, 0.999])
    expected = [COMPRESSED] * 2 + [2 * k for k in (4096, 1024, 256, 65, 16, 16, 16)]
    for step, count in enumerate(expected):
        train(optimizer, own, 1, step)
        sent = optimizer.compression.stats.last.entries_sent
        assert sent == count, (step, sent)


@case
def a_parameters_own_regularizer_goes_first():
    own = parameters()
    own[0].regularizer = L2Decay(0.02)
    own[2].regularizer = L1Decay(0.03)
    own[4].regularizer = L2Decay(0.0)
    groups = [{"params": own[:3]}, {"params": own[3:], "regularization": L2Decay(0.05)}]
    optimizer = make(groups, regularization=L1Decay(0.01), rampup_begin_step=2, sparsity=[0.9])
    oracle = oracle_of(own, begin=2, sparsity=(0.9,), l1=[0, 0.01, 0.03, 0, 0], l2=[0.02, 0, 0, 0.05, 0])
    train(optimizer, own, 5)
    oracle_train(oracle, own, 5)
    assert_close(own, oracle)


@case
def learning_rates_of_groups_and_schedulers():
    own = parameters()
    optimizer = make([{"params": own[:2], "lr": 0.05}, {"params": own[2:]}], sparsity=[0.9], rampup_begin_step=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    oracles = [oracle_of(own, lr=lr, begin=2, sparsity=(0.9,)) for lr in (0.05, 0.1)]
    for step in range(6):
        train(optimizer, own, 1, step)
        for oracle in oracles:
            oracle_train(oracle, own, 1, step)
            oracle.lr *= 0.5 if step % 2 else 1
        scheduler.step()
    oracles[1].parameters[:2] = oracles[0].parameters[:2]
    assert_close(own, oracles[1])


@case(nesterov=(False, True), first=(2, 5), decay=("the same", "another kind"))
def resume_continues_bit_for_bit(nesterov, first, decay):
    """A saved kind of decay takes the place of that which was given."""
    options = dict(rampup_begin_step=3, sparsity=[0.9, 0.99], rampup_step=4, use_nesterov=nesterov)
    own = parameters()
    optimizer = make(own, regularization=L2Decay(0.01), **options)
    train(optimizer, own, first)
    optimizer.param_groups[0]["lr"] = 0.04
    optimizer.compression.average(optimizer)
    resumed_own, state = twin(own), through_file(optimizer.state_dict())
    resumed = make(resumed_own, regularization=L2Decay(0.01) if decay == "the same" else L1Decay(0.05), **options)
    resumed.set_dict(state)
    train(optimizer, own, 5, first)
    train(resumed, resumed_own, 5, first)
    assert_bits_equal(resumed_own, own)


@case
def states_that_do_not_fit_are_refused():
    own = parameters()
    optimizer = make(own)
    train(optimizer, own, 1)
    raises(LayoutError, "the ranks differ in what they have not sent", optimizer.state_dict)
    optimizer.compression.average(optimizer)
    state = optimizer.state_dict()

    def changed(**entries):
        return {**state, "compression": {**state["compression"], **entries}}

    def with_u(value):
        names = state["compression"]["parameters"]
        return changed(parameters={**names, "group0.0": {**names["group0.0"], "u": value}})

    bad = [
        (AssertionError, "has no 'compression'", {k: v for k, v in state.items() if k != "compression"}),
        (AssertionError, "states differ between ranks", changed(step=1 + hvd.rank())),
        (AssertionError, "group0.0", with_u(torch.zeros(3))),
        (RuntimeError, "is a str", with_u("x")),
        (AssertionError, "groups of", {**state, "param_groups": []}),
    ]
    for error, match, value in bad:
        raised = raises(error, match, lambda: optimizer.load_state_dict(value))  # noqa: B023
        assert error is RuntimeError or isinstance(raised, LayoutError)
    optimizer.load_state_dict(state)
    state["param_groups"] = copy.deepcopy(state["param_groups"])
    state["param_groups"][0]["lr"] += differs()
    raises(LayoutError, "lr of group 0", lambda: optimizer.load_state_dict(state))
    train(optimizer, own, 1)
    assert_replicas_identical(own)


@case
def minimize_is_a_whole_iteration():
    torch.manual_seed(0)
    model = nn.Linear(128, 128)
    optimizer = make(model.named_parameters(), learning_rate=0.01, momentum=0.5, sparsity=[0.9])
    losses = []
    for _ in range(40):
        loss = model(torch.ones(2, 128) * (1 + hvd.rank())).square().mean()
        operations, pairs = optimizer.minimize(loss)
        losses.append(loss.item())
        assert operations == []
        assert [p is q and g is p.grad for (p, g), q in zip(pairs, model.parameters(), strict=True)] == [True, True]
    assert losses[-1] < 0.2 * losses[0], losses
    raises(TypeError, "no_grad_set", lambda: optimizer.minimize(loss, no_grad_set={1}))
    assert_replicas_identical(list(model.parameters()))


@case("2ranks")
def the_lines_of_elsewhere_md_train():
    (code,) = shown("elsewhere.md", "Paddle's lines in PyTorch")
    build, iterate = code.replace("num_trainers=4", "num_trainers=2").split("optimizer.minimize")
    names = {"model": nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 1))}
    exec(build, names)
    data = torch.randn(16, 128, generator=torch.Generator().manual_seed(hvd.rank()))
    for _ in range(3):
        names["loss"] = names["model"](data).square().mean()
        exec("optimizer.minimize" + iterate, names)
        names["optimizer"].compression.average(names["optimizer"])
        names["optimizer"].state_dict()
    assert names["optimizer"].compression.stats.steps == 3
    assert_replicas_identical(list(names["model"].parameters()))
    names["optimizer"].compression.close()


@case
def a_grad_scaler_skips_on_all_ranks_and_nothing_is_lost():
    own = parameters()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = make(own, sparsity=[0.9], loss_scale=scaler)
    reference_own = twin(own)
    reference = make(reference_own, sparsity=[0.9])
    for step in range(4):
        before = [p.detach().clone() for p in own]
        overflow = step == 2
        optimizer.zero_grad()
        loss = sum((p * gradient(p, step, i, hvd.rank())).sum() for i, p in enumerate(own))
        scaler.scale(loss * float("inf") if overflow and hvd.rank() == 1 else loss).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert_bits_equal(own, before)
            continue
        if step < 2:
            train(reference, reference_own, 1, step)
            for p, e in zip(own, reference_own, strict=True):
                assert (p - e).abs().max() <= 1e-6 * e.abs().max()
        assert_replicas_identical(own)


@case
def argument_errors():
    p = parameters()
    given = dict(learning_rate=0.1, momentum=0.9, rampup_begin_step=0)
    bad = [  # what needs no rank is in tests/adapter/test_paddle.py
        (AssertionError, "num_trainers is 9, but", {**given, "num_trainers": 9}),
        (ValueError, "mean the same", {**given, "lr": 0.1}),
        (TypeError, "unknown option 'nonsense'", {**given, "nonsense": 1}),
        (ValueError, "values is 'float13'", {**given, "values": "float13"}),
        (ValueError, "empty parameter list", {**given, "params": []}),
    ]
    for error, match, options in bad:
        options = {"params": p, **options}
        raised = raises(error, match, lambda: dgc.DGCMomentum(**options))  # noqa: B023
        assert isinstance(raised, (ConfigError, TypeError)) or "empty" in match
    raises(ValueError, "weight_decay", lambda: make([{"params": p, "weight_decay": 0.1}]))
    raises(AssertionError, "a group's regularization", lambda: make([{"params": p, "regularization": "l2"}]))
    optimizer = make(p, lr=0.1, learning_rate=None)
    raises(ConfigError, "cannot be added", lambda: optimizer.add_param_group({"params": parameters()}))
    raises(ConfigError, "averages gradients itself", lambda: hvd.DistributedOptimizer(optimizer))
    raises(TypeError, "load_state_dict\\(optimizer.state_dict\\(\\)\\)", lambda: copy.deepcopy(optimizer))


@case
def ranks_that_disagree_all_get_an_error():
    own = parameters()
    raises(ConfigError, "sparsity", lambda: make(own, sparsity=[0.9 if differs() else 0.8]))
    raises(LayoutError, "group0.0", lambda: make(parameters([(300, 300 + differs())])))
    raises(
        AssertionError if differs() else DGCError,
        "momentum is None",
        lambda: make(own, momentum=[0.9, None][differs()]),
    )
    raises(ConfigError, "lr of group 0", lambda: make(own, learning_rate=0.1 + differs()))
    raises(ConfigError, "nesterov", lambda: make(own, use_nesterov=bool(differs())))
    groups = [{"params": own[:1]}, {"params": own[1:], "regularization": [L1Decay(0.1), L2Decay(0.1)][differs()]}]
    raises(ConfigError, "l1 of group 1", lambda: make(groups))
    own[0].regularizer = "l2" if differs() else None
    raises(DGCError, "the regularizer of 'group0.0' is 'l2'", lambda: make(own))
    own[0].regularizer = None
    optimizer = make(own)
    state, before = optimizer.state_dict(), twin(own)
    for key in ("momentum", "lr"):
        optimizer.param_groups[0][key] = 0.9 - 0.1 * differs()
        raises(ConfigError, "disagree", lambda: train(optimizer, own, 1))
        assert_bits_equal(own, before)
        optimizer.load_state_dict(state)
    train(optimizer, own, 2)
    assert_replicas_identical(own)


@case
def sparse_gradients_are_exchanged_as_dense_ones():
    torch.manual_seed(0)
    embedding = nn.Embedding(1000, 32, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = make(embedding.named_parameters(), exclude="weight")
    embedding(torch.tensor([1, 2 + hvd.rank()])).sum().backward()
    optimizer.step()
    moved = (embedding.weight - before).abs().sum(1)
    assert moved.nonzero().view(-1).tolist() == [1, *range(2, 2 + hvd.size())]

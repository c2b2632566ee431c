"""On real ranks: the sharded optimizer inside distributed optimizers, plain, compressed and fused; bytes and memory."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings

import horovod.torch as hvd
import numpy as np
import torch
from adapters_torch.workers.models import loss_of, make_model, train, wrap
from torch import nn
from worker_tools import case, report, run_cases
from zero_tools import OPTIMIZERS, assert_bits_equal, assert_replicas_identical, raises

import dgc.torch as dgc
from dgc.errors import ConfigError
from dgc.torch.zero import ZeroRedundancyOptimizer as Zero


def _horovod(model, optimizer):
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def _trained(make_optimizer, steps=8, **kwargs):
    model = make_model(**kwargs)
    optimizer = make_optimizer(model)
    train(optimizer, model, steps)
    assert_replicas_identical(list(model.parameters()))
    return model, optimizer


@case
def inside_stock_horovod():
    for (cls, options), views in itertools.product(OPTIMIZERS.values(), (False, True)):
        expected, _ = _trained(lambda m: _horovod(m, cls(m.parameters(), **options)))  # noqa: B023
        actual, optimizer = _trained(
            lambda m: _horovod(m, Zero(m.parameters(), cls, parameters_as_bucket_view=views, **options))  # noqa: B023
        )
        assert_bits_equal(actual.parameters(), expected.parameters())
        assert isinstance(optimizer, Zero)
        assert isinstance(optimizer.optim, cls)
        assert len(optimizer.optim.state) < len(list(actual.parameters()))


@case
def what_is_frozen_for_a_while_gets_horovods_zero_gradients():
    """Sharded or not: moments decay and move it on, while without a gradient, as under torch's DDP, it would stay."""

    def run(make, horovod=True, keep=False):
        model = make_model()
        optimizer = _horovod(model, make(model)) if horovod else make(model)
        for step in range(9):
            model.last.requires_grad_(not 3 <= step < 6)
            if step == 3:
                before = model.last.weight.detach().clone()
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if not horovod:
                for name, p in model.named_parameters():
                    if p.grad is not None:
                        # Named: without a name Horovod counts operations, which earlier failures left unequal.
                        p.grad = hvd.allreduce(p.grad, name=f"gradient of {name}")
            if horovod:
                optimizer.synchronize()
            if keep and 3 <= step < 6:
                model.last.weight.grad = model.last.bias.grad = None
            with warnings.catch_warnings(), optimizer.skip_synchronize() if horovod else contextlib.nullcontext():
                warnings.simplefilter("ignore")
                optimizer.step()
            if step == 5:
                moved = not torch.equal(model.last.weight, before)
        return list(model.parameters()), moved

    for cls in (torch.optim.Adam, torch.optim.AdamW):
        dense, moved = run(lambda m: cls(m.parameters(), lr=0.01))  # noqa: B023
        sharded, moved_too = run(lambda m: Zero(m.parameters(), cls, lr=0.01))  # noqa: B023
        ddp, moved_ddp = run(lambda m: cls(m.parameters(), lr=0.01), horovod=False)  # noqa: B023
        kept, moved_kept = run(lambda m: Zero(m.parameters(), cls, lr=0.01), keep=True)  # noqa: B023
        assert (moved, moved_too, moved_ddp, moved_kept) == (True, True, False, False)
        assert_bits_equal(sharded, dense)
        assert_bits_equal(kept, ddp)
        assert any(not torch.equal(a, b) for a, b in zip(dense, ddp, strict=True))
        assert_replicas_identical(sharded)


@case
def state_loaded_before_wrapping_is_kept():
    model, optimizer = _trained(lambda m: _horovod(m, torch.optim.Adam(m.parameters(), lr=0.01)), 3)
    saved = optimizer.state_dict()
    resumed = make_model(seed=5)
    resumed.load_state_dict(model.state_dict())
    zero = Zero(resumed.parameters(), torch.optim.Adam, lr=0.01)
    zero.load_state_dict(saved)
    distributed = _horovod(resumed, zero)
    for opt, m in ((optimizer, model), (distributed, resumed)):
        train(opt, m, 3, start=3)
    assert_bits_equal(resumed.parameters(), model.parameters())
    distributed.consolidate_state_dict(to=0)
    if hvd.rank() == 0:
        for key, entry in optimizer.state_dict()["state"].items():
            assert torch.equal(entry["exp_avg"], distributed.state_dict()["state"][key]["exp_avg"])


@case
def schedulers_made_before_or_after_wrapping():
    for early in (False, True):
        model, reference = make_model(), make_model()
        zero = Zero(model.parameters(), torch.optim.SGD, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(zero, 2, 0.5) if early else None
        optimizer = _horovod(model, zero)
        scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        plain = _horovod(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
        other = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
        train(optimizer, model, 5, after=lambda step: scheduler.step())  # noqa: B023
        train(plain, reference, 5, after=lambda step: other.step())  # noqa: B023
        assert_bits_equal(model.parameters(), reference.parameters())


@case
def one_cycle_with_dgc_equals_the_unsharded_run():
    """Its momentum is adopted anew at every step, on every rank."""
    sgd, schedule = dict(lr=0.05, momentum=0.9, weight_decay=1e-3), torch.optim.lr_scheduler.OneCycleLR
    for way, views in itertools.product("ab", (False, True)):
        models = make_model(), make_model()
        for model, make in zip(models, (torch.optim.SGD, Zero), strict=True):
            extra = {} if make is torch.optim.SGD else dict(parameters_as_bucket_view=views)
            inner = (torch.optim.SGD,) if make is Zero else ()
            optimizer, compression = wrap(way, model, make(model.parameters(), *inner, **sgd, **extra), sparsity=0.95)
            scheduler = schedule(optimizer, max_lr=0.2, total_steps=12)
            train(optimizer, model, 10, after=lambda step: scheduler.step())  # noqa: B023
            compression.close()
        assert_bits_equal(models[1].parameters(), models[0].parameters())
        assert_replicas_identical(list(models[1].parameters()))


@case
def grad_scaler_skips_the_same_step_everywhere():
    def run(make):
        model = make_model()
        optimizer = make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(5):
            optimizer.zero_grad()
            # The overflow arises within backward: afterwards the exchange may already be under way.
            overflow = model.last.weight.register_hook(lambda grad: grad * float("inf"))
            if step != 2 or hvd.rank() != 1:
                overflow.remove()
            scaler.scale(loss_of(model, step)).backward()
            overflow.remove()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
        return list(model.parameters())

    sgd = dict(lr=0.05, momentum=0.9)
    expected = run(lambda m: _horovod(m, torch.optim.SGD(m.parameters(), **sgd)))
    for views in (False, True):
        zero = lambda m: Zero(m.parameters(), torch.optim.SGD, parameters_as_bucket_view=views, **sgd)  # noqa: B023, E731
        actual = run(lambda m: _horovod(m, zero(m)))  # noqa: B023
        assert_bits_equal(actual, expected)
        assert_replicas_identical(actual)
        compressed = run(
            lambda m: dgc.DistributedOptimizer(
                zero(m),  # noqa: B023
                named_parameters=m.named_parameters(),
                compression=dgc.Compression.dgc(sparsity=0.9),
            )
        )
        assert_replicas_identical(compressed)
        assert all(p.isfinite().all() for p in compressed)


@case
def a_group_that_horovod_would_not_average_is_refused():
    for make in (
        lambda m, zero: _horovod(m, zero),
        lambda m, zero: dgc.DistributedOptimizer(zero, m.named_parameters(), compression=dgc.Compression.dgc()),
    ):
        model = make_model()
        optimizer = make(model, Zero(model.parameters(), torch.optim.SGD, lr=0.1))
        group = {"params": [nn.Parameter(torch.zeros(5))]}
        raises(ConfigError, "add_param_group before wrapping", lambda: optimizer.add_param_group(group))  # noqa: B023
        train(optimizer, model, 2)
        assert len(optimizer.param_groups) == 1
        assert_replicas_identical(list(model.parameters()))


@case
def copies_of_a_wrapped_optimizer_are_refused():
    model = make_model()
    optimizer = _horovod(model, Zero(model.parameters(), torch.optim.SGD, lr=0.1))
    raises(TypeError, r"save state_dict\(\)", lambda: copy.deepcopy(optimizer))


@case
def gradients_of_a_closure_are_averaged():
    model, reference = make_model(), make_model()
    optimizer = _horovod(model, Zero(model.parameters(), torch.optim.SGD, lr=0.1))
    plain = _horovod(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    train(plain, reference, 3)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        with optimizer.skip_synchronize():
            assert optimizer.step(closure).item() > 0
    assert_bits_equal(model.parameters(), reference.parameters())


@case
def with_dgc_it_equals_the_unsharded_run():
    """Same exchange, same momentum in the compressor, same bits; and the parameters travel as entries."""
    sgd = dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    options = dict(sparsity=0.99, rampup_begin_step=2)
    for way, views in itertools.product("ab", (False, True)):
        expected, actual = make_model(width=128), make_model(width=128)
        plain, first = wrap(way, expected, torch.optim.SGD(expected.parameters(), **sgd), **options)
        zero, second = wrap(
            way, actual, Zero(actual.parameters(), torch.optim.SGD, parameters_as_bucket_view=views, **sgd), **options
        )
        train(plain, expected, 12)
        train(zero, actual, 12)
        assert_bits_equal(actual.parameters(), expected.parameters())
        assert_replicas_identical(list(actual.parameters()))
        assert zero.param_groups[0]["momentum"] == 0.9
        assert zero.optim.param_groups[0]["momentum"] == 0, "what the shard's last update used"
        assert not any("momentum_buffer" in s and s["momentum_buffer"] is not None for s in zero.optim.state.values())
        for ours, theirs in zip(
            second.state_dict()["parameters"].values(), first.state_dict()["parameters"].values(), strict=True
        ):
            np.testing.assert_array_equal(ours["u"], theirs["u"])
        assert zero.stats.last.bytes_sent < 0.2 * zero.stats.last.dense_bytes, zero.stats.last
        first.close()
        second.close()


@case
def with_dgc_a_dense_checkpoints_momentum_reaches_every_rank():
    sgd = dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    for way in "ab":
        model, dense = _trained(lambda m: _horovod(m, torch.optim.SGD(m.parameters(), **sgd)), 6)
        checkpoint = dense.state_dict()
        resumed = make_model(seed=5)
        resumed.load_state_dict(model.state_dict())
        zero, compression = wrap(
            way, resumed, Zero(resumed.parameters(), torch.optim.SGD, **sgd), rampup_begin_step=1000
        )
        zero.load_state_dict(checkpoint)
        train(dense, model, 5, start=6)
        train(zero, resumed, 5, start=6)
        for a, e in zip(resumed.parameters(), model.parameters(), strict=True):
            assert (a - e).abs().max() <= 1e-6 * e.abs().max()
        assert not any("momentum_buffer" in s for s in zero.optim.state.values())
        assert checkpoint["param_groups"][0]["momentum"] == 0.9
        compression.close()


@case("4ranks")
def another_process_set_for_the_gradients_is_refused():
    even = hvd.add_process_set([0, 2])
    if hvd.rank() % 2 == 0:
        model = make_model()
        optimizer = _horovod(model, Zero(model.parameters(), torch.optim.SGD, lr=0.1, group=even))
        with optimizer.skip_synchronize():
            raises(ConfigError, "give both the same process set", optimizer.step)
    hvd.barrier()


@case
def adam_state_of_20_million_parameters():
    """Bytes of optimizer state on this rank over those of the unsharded optimizer: at most 1/P + 5 %."""
    shapes = [(1024, 1024)] * 16 + [(512, 2048), (1024,), (2048,), (1000, 2200)] + [(256,)] * 20
    own = [nn.Parameter(torch.zeros(s)) for s in shapes]
    zero = Zero(own, torch.optim.Adam, lr=1e-3)
    for p in own:
        p.grad = torch.full_like(p, 1e-3)
    for _ in range(2):
        zero.step()
    numel = sum(p.numel() for p in own)
    state = sum(t.numel() * t.element_size() for s in zero.optim.state.values() for t in s.values())
    assert zero._sharing._tracker._before is None
    whole = numel * 8 + 4 * len(own)
    share = state / whole
    report({"parameters": numel, "state_bytes": state, "share": share})
    assert numel >= 20e6
    assert share <= 1 / hvd.size() + 0.05, share


@case
def bytes_with_dgc_against_dense_broadcasts():
    """Gradients and parameters together at 99.9 %, against what dense broadcasts of the parameters alone take."""

    def make(seed=0):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(20, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))

    sgd = dict(lr=0.05, momentum=0.9)
    totals = {}
    for kind in ("dense", "dgc"):
        model = make()
        zero = Zero(model.parameters(), torch.optim.SGD, sparse_parameters=kind == "dgc", **sgd)
        if kind == "dgc":
            compression = dgc.Compression.dgc(sparsity=0.999)
            optimizer = dgc.DistributedOptimizer(zero, model.named_parameters(), compression=compression)
        else:
            optimizer = _horovod(model, zero)
        for step in range(6):
            torch.manual_seed(100 * step + hvd.rank())
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(32, 20)), torch.randint(0, 10, (32,))).backward()
            optimizer.step()
        assert_replicas_identical(list(model.parameters()))
        last = optimizer.stats.last
        totals[kind] = np.array([last.bytes_sent, last.bytes_received], float)
        if kind == "dgc":
            gradients = compression.stats.last
            report({"gradients sent": gradients.bytes_sent, "parameters sent": last.bytes_sent})
            totals[kind] += [gradients.bytes_sent, gradients.bytes_received]
            compression.close()
    both = np.empty((2, hvd.size(), 2))
    for i, kind in enumerate(("dense", "dgc")):
        both[i] = hvd.allgather(torch.from_numpy(totals[kind]).view(1, 2), name=f"totals.{kind}").numpy()
    dense, compressed = both.sum(axis=(1, 2))
    report({"dense": dense, "dgc": compressed, "ratio": dense / compressed})
    if hvd.size() == 2:
        assert dense / compressed >= 20, dense / compressed


@case
def received_entries_update_all_shares_on_every_rank():
    """The same bits as with dense results, and nothing is left to send but the counts."""
    sgd = dict(lr=0.05, momentum=0.9, weight_decay=0.01)
    for view in (False, True):
        trained, sent = [], []
        for sparse in (True, False):
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(20, 256, bias=False), nn.ReLU(), nn.Linear(256, 10, bias=False))
            zero = Zero(model.parameters(), torch.optim.SGD, parameters_as_bucket_view=view, **sgd)
            compression = dgc.Compression.dgc(sparsity=0.99, sparse_updates=sparse)
            optimizer = dgc.DistributedOptimizer(zero, model.named_parameters(), compression=compression)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
            for step in range(10):
                torch.manual_seed(100 * step + hvd.rank())
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(torch.randn(32, 20)), torch.randint(0, 10, (32,))).backward()
                optimizer.step()
                schedule.step()
            assert (compression.describe()["updates"] == "sparse") is sparse, compression.describe()
            assert_replicas_identical(list(model.parameters()))
            trained.append([p.detach().clone() for p in model.parameters()])
            sent.append(optimizer.stats.last.bytes_sent)
            compression.close()
        assert_bits_equal(*trained)
        assert sent[0] <= 64, sent
        assert sent[0] < sent[1], sent


if __name__ == "__main__":
    run_cases()

"""On real ranks: what compressed training must be equal to."""

from __future__ import annotations

import copy
import itertools

import horovod.torch as hvd
import torch
from models import (
    OPTIMIZERS,
    assert_replicas_identical,
    dense_backward,
    dense_reference,
    each_way,
    flat,
    loss_of,
    make_model,
    raises,
    sgd,
    train,
    worst_difference,
    wrap,
)
from worker_tools import case, run_cases

import dgc.torch as dgc
from dgc.torch.momentum import DGCMomentum


def dense_equality(bound, **options):
    for way, (name, own) in itertools.product("ab", OPTIMIZERS.items()):
        model = make_model()
        expected = dense_reference(model, 20, **own)
        buckets = {"bucket_bytes": 8192} if way == "b" else {}
        optimizer, _ = wrap(way, model, sgd(model, **own), **options, **buckets)
        train(optimizer, model, 20)
        difference = worst_difference(model, expected)
        assert difference <= bound, f"way {way}, {name}: {difference:.2e}"
        assert optimizer.param_groups[0]["momentum"] == own["momentum"]
        assert not optimizer.state_dict()["state"], "momentum is the compressor's"
        assert_replicas_identical(model, f"{way} {name}")


BRANCHES = ["left", "right", "both"]
EXACT = {"sparsity": 0.0, "momentum_masking": False}


@case
def before_the_rampup_training_equals_dense_sgd():
    dense_equality(1e-6, rampup_begin_step=1000)


@case
def sparsity_0_equals_dense_sgd():
    dense_equality(1e-5, **EXACT)


@case
def op_sum_equals_sgd_on_summed_gradients():
    for way, begin in itertools.product("ab", (0, 4)):
        model = make_model()
        own = dict(lr=0.05, momentum=0.9, weight_decay=0.01)
        expected = dense_reference(model, 10, op="sum", **own)
        options = {**EXACT, "rampup_begin_step": begin, **({"op": hvd.Sum} if way == "a" else {})}
        optimizer, _ = wrap(way, model, sgd(model, **own), hvd_options={"op": hvd.Sum}, **options)
        train(optimizer, model, 10)
        difference = worst_difference(model, expected)
        assert difference <= 1e-5, f"way {way}, compressed from step {begin} on: {difference:.2e}"


@case
def replicas_identical_after_50_steps_with_unused_parameters():
    """The ranks use different branches, so backward orders differ and some parameters are unused on some ranks."""
    for way, begin in itertools.product("ab", (0, 10)):
        model = make_model(width=128)
        options = dict(sparsity=[0.75, 0.99], rampup_step=10, rampup_begin_step=begin, bucket_bytes=40_000)
        optimizer, compression = wrap(way, model, sgd(model, lr=0.05, nesterov=True), **options)
        train(optimizer, model, 50, branch=lambda step: BRANCHES[(step + hvd.rank()) % 3])
        assert_replicas_identical(model, f"{way}{begin}")
        assert len(compression.engine.exchange.layout.buckets) > 1
        assert 0.005 < compression.stats.last.density < 0.011


@case
def a_frozen_layer_is_left_alone():
    def freeze(model, step):
        model.left.requires_grad_(not 3 <= step < 9)

    for way in "ab":
        model = make_model()
        own = dict(momentum=0.9, weight_decay=0.01)
        expected = dense_reference(model, 14, before=freeze, **own)
        optimizer, _ = wrap(way, model, sgd(model, **own), **EXACT)
        for step in range(14):
            freeze(model, step)
            train(optimizer, model, 1, start=step)
        assert worst_difference(model, expected) <= 1e-5, (way, worst_difference(model, expected))
        makes = (sgd, lambda m: sgd(m, momentum=0.0), lambda m: torch.optim.AdamW(m.parameters()))
        for number, make in enumerate(makes):
            model = make_model()
            options = {} if make is sgd else {"momentum": 0.0}
            optimizer, _ = wrap(way, model, make(model), sparsity=0.99, **options)
            train(optimizer, model, 4)
            model.left.requires_grad_(False)
            before = flat(model.left)
            train(optimizer, model, 6, start=4)
            assert torch.equal(flat(model.left), before), way
            assert_replicas_identical(model, f"frozen {way} {number}")


@case
def a_frozen_layer_whose_gradient_is_zeroed_in_place_moves_by_its_momentum_as_in_dense_training():
    own = dict(momentum=0.9, weight_decay=0.01)
    for way in "ab":
        model, expected = make_model(), make_model()
        plain = sgd(expected, **own)
        optimizer, _ = wrap(way, model, sgd(model, **own), **EXACT)
        for step in range(14):
            for each in (model, expected):
                each.left.requires_grad_(not 3 <= step < 9)
                each.zero_grad(set_to_none=False)
            loss_of(model, step).backward()
            optimizer.step()
            dense_backward(expected, step)
            plain.step()
        assert worst_difference(model, expected) <= 1e-5, (way, worst_difference(model, expected))


@case
def one_cycle_momentum_is_not_doubled():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=30, base_momentum=0.5, max_momentum=0.95
        )

    for way, nesterov, rampup in itertools.product("ab", (False, True), (0, 10)):
        model = make_model()
        own = dict(momentum=0.9, nesterov=nesterov)
        expected = dense_reference(model, 20, schedule=schedule, **own)
        optimizer, _ = wrap(way, model, sgd(model, **own), **EXACT, rampup_begin_step=rampup)
        scheduler = schedule(optimizer)
        train(optimizer, model, 20, after=lambda step, scheduler=scheduler: scheduler.step())
        assert worst_difference(model, expected) <= 1e-5, worst_difference(model, expected)


@case
def backward_passes_per_step_and_early_step():
    for way in "ab":
        model = make_model()
        reference = make_model()
        plain = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
        passes = {"backward_passes_per_step": 2}
        optimizer, _ = wrap(way, model, sgd(model, lr=0.05), hvd_options=passes, **EXACT)
        step = 0
        for passes in (2, 2, 1, 2):  # the third step comes early
            optimizer.zero_grad()
            plain.zero_grad()
            for _ in range(passes):
                loss_of(model, step).backward()
                dense_backward(reference, step)
                step += 1
            optimizer.step()
            plain.step()
        assert worst_difference(model, reference) <= 1e-5


@case
def groups_keep_their_own_options():
    """Two parameter groups with different momentum and decay, each equal to its dense counterpart."""

    def make(m):
        groups = [
            {"params": [*m.first.parameters(), *m.left.parameters()], "momentum": 0.5, "weight_decay": 0.05},
            {"params": [*m.right.parameters(), *m.last.parameters()], "momentum": 0.9, "nesterov": True},
        ]
        return torch.optim.SGD(groups, lr=0.1)

    for way in "ab":
        model = make_model()
        expected = dense_reference(model, 8, make=make)
        optimizer, _ = wrap(way, model, make(model), **EXACT)
        train(optimizer, model, 8)
        assert worst_difference(model, expected) <= 1e-5


@case
def stock_groups_work_in_way_a():
    for groups in (2, None):
        model = make_model()
        expected = dense_reference(model, 6, momentum=0.9)
        optimizer, _ = wrap("a", model, sgd(model), **EXACT, hvd_options={"groups": groups})
        train(optimizer, model, 6)
        assert worst_difference(model, expected) <= 1e-5


@case
def sparse_embeddings_are_sent_dense():
    """With sparse_as_dense=True, or named in exclude=: an optimizer that wants sparse gradients gets sparse ones."""
    for hvd_options, options in (({"sparse_as_dense": True}, {}), ({}, {"exclude": ["0.*"]})):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(50, 40, sparse=True), torch.nn.Flatten(), torch.nn.Linear(160, 64)
        )
        inner = torch.optim.SparseAdam(list(model[0].parameters())) if options else sgd(model, momentum=0.0)
        optimizer, compression = wrap("b", model, inner, hvd_options=hvd_options, **options, **EXACT)
        reference = copy.deepcopy(model)
        dense = type(inner)(
            list(reference[0].parameters() if options else reference.parameters()), lr=inner.defaults["lr"]
        )
        for step in range(5):
            optimizer.zero_grad()
            seeds = [torch.Generator().manual_seed(9 * step + rank) for rank in range(hvd.size())]
            words = [torch.randint(0, 50, (8, 4), generator=seed) for seed in seeds]
            model(words[hvd.rank()]).square().mean().backward()
            optimizer.step()
            dense.zero_grad()
            sum(reference(w).square().mean() / len(words) for w in words).backward()
            dense.step()
        assert_replicas_identical(model, f"embedding {options}")
        assert worst_difference(model, reference) <= 1e-5, worst_difference(model, reference)
        compression.close()


@case
def gradient_types():
    """float16, bfloat16 and float64 models train, with replicas identical and results in the gradient's type."""
    for way, dtype in itertools.product("ab", (torch.float16, torch.bfloat16, torch.float64)):
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 60).to(dtype)
        optimizer, compression = wrap(way, model, sgd(model, lr=0.05), sparsity=0.9, sparse_updates=False)
        before = model.weight.detach().clone()
        for step in range(5):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + hvd.rank())
            model(torch.randn(8, 40, generator=generator).to(dtype)).square().mean().backward()
            optimizer.step()
            assert model.weight.grad.dtype == dtype
        assert_replicas_identical(model, f"types {way} {dtype}")
        assert not torch.equal(before, model.weight)
        state = compression.engine.exchange.state.buckets[0].u.dtype
        assert state == ("float64" if dtype is torch.float64 else "float32")


@case
def non_contiguous_gradients():
    for way in "ab":
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.Conv2d(16, 16, 3)).to(
            memory_format=torch.channels_last
        )
        reference = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.Conv2d(16, 16, 3))
        reference.load_state_dict(model.state_dict())
        optimizer, _ = wrap(way, model, sgd(model, weight_decay=0.01), **EXACT)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for step in range(4):
            data = [
                torch.randn(4, 8, 9, 9, generator=torch.Generator().manual_seed(10 * step + r))
                for r in range(hvd.size())
            ]
            optimizer.zero_grad()
            model(data[hvd.rank()].to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
            plain.zero_grad()
            for x in data:
                (reference(x).square().mean() / hvd.size()).backward()
            plain.step()
        assert worst_difference(model, reference) <= 1e-4


@case
def a_grad_scaler_skips_the_same_steps_on_all_ranks():
    """Overflow on rank 1 alone: all ranks skip that step, nothing sent in it counts, and training goes on."""
    for way in "ab":
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        optimizer, compression = wrap(way, model, sgd(model), sparsity=0.9, loss_scale=scaler)
        skipped = []
        for step in range(12):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            if step == 5 and hvd.rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() < scale:
                skipped.append(step)
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert skipped == [5], skipped
        assert compression.stats.refused_steps == 1
        assert compression.engine.exchange.state.step == 11
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert_replicas_identical(model, f"scaler {way}")


@case
def float16_overflow_refuses_the_step_everywhere():
    """A model in float16: the loss is scaled so far that one rank's gradient is infinite."""
    for way in "ab":
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 60).half()
        scale = {"now": 1024.0}
        now = lambda scale=scale: scale["now"]  # noqa: E731
        optimizer, _ = wrap(way, model, sgd(model, lr=0.05), sparsity=0.9, loss_scale=now)
        refused = []
        for step in range(6):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + hvd.rank())
            loss = model(torch.randn(8, 40, generator=generator).half()).square().mean()
            (loss * scale["now"] * (1e6 if step == 2 and hvd.rank() == 0 else 1)).backward()
            optimizer.synchronize()
            finite = all(torch.isfinite(p.grad).all() for p in model.parameters())
            refused.append(not finite)
            if finite:
                for p in model.parameters():
                    p.grad.div_(scale["now"])
                with optimizer.skip_synchronize():
                    optimizer.step()
        assert refused == [False, False, True, False, False, False], refused
        assert_replicas_identical(model, f"overflow {way}")


@case
def residuals_survive_broadcast_optimizer_state():
    for way, model, optimizer, compression in each_way(sparsity=0.99):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert compression.engine.exchange.state.step == 0
        optimizer.zero_grad()
        train(optimizer, model, 3)
        before = compression.state_dict()
        norm = compression.residual_norm
        norms = hvd.allgather_object(norm, name=f"norms {way}")
        assert len(set(norms)) == hvd.size(), "residuals should differ between ranks"
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        after = compression.state_dict()
        assert compression.residual_norm == norm
        for name, entry in before["parameters"].items():
            for key, value in entry.items():
                assert (value == after["parameters"][name][key]).all() or key == "threshold"
        optimizer.zero_grad()
        train(optimizer, model, 3, start=3)
        assert_replicas_identical(model, f"broadcast {way}")


@case("4ranks")
def process_sets():
    evens = hvd.add_process_set([0, 2])
    for way in "ab":
        model = make_model()
        options = {"process_set": evens} if way == "a" else {}
        optimizer, compression = wrap(
            way, model, sgd(model), hvd_options={"process_set": evens}, sparsity=0.9, **options
        )
        included = hvd.rank() in (0, 2)
        assert (compression.engine is not None) == included
        train(optimizer, model, 5)
        assert bool(optimizer.state_dict()["state"]) != included, "who exchanges gradients adopts momentum"
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        gathered = hvd.allgather(flat.unsqueeze(0), name=f"sets {way}")
        assert torch.equal(gathered[0], gathered[2])
        assert not torch.equal(gathered[0], gathered[1])
    hvd.remove_process_set(evens)


@case("4ranks")
def process_sets_that_overlap():
    """First on some ranks, then on all: the ranks of both have made more compressors than the others."""
    pair = hvd.add_process_set([0, 1])
    models = [make_model(), make_model()]
    made = []
    for chosen, model in zip((pair, hvd.global_process_set), models, strict=True):
        made.append(wrap("b", model, sgd(model), hvd_options={"process_set": chosen}, sparsity=0.9))
    for model, (optimizer, _) in zip(models, made, strict=True):
        train(optimizer, model, 3)
    assert_replicas_identical(models[1], "overlap")
    for _, compression in made:
        compression.close()

    model = make_model()
    if pair.included():
        DGCMomentum(model.parameters(), 0.1, 0.9, 0, process_set=pair).close()
    optimizer = DGCMomentum(model.parameters(), 0.1, 0.9, 0)
    train(optimizer, model, 3)
    assert_replicas_identical(model, "overlap momentum")
    optimizer.close()
    hvd.remove_process_set(pair)


@case
def one_compressor_cannot_serve_two_models():
    model = make_model()
    optimizer, compression = wrap("b", model, torch.optim.SGD(model.parameters(), lr=0.1), sparsity=0.9)
    other = make_model()
    raises(
        dgc.ConfigError,
        "one compressor",
        lambda: dgc.DistributedOptimizer(
            torch.optim.SGD(other.parameters(), lr=0.1), other.named_parameters(), compression=compression
        ),
    )
    compression.close()
    del optimizer


if __name__ == "__main__":
    run_cases()

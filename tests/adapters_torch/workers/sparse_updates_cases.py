"""On real ranks: parameters updated by received entries alone are those of the dense way, bit for bit."""

import copy
import itertools
import math
import types
import warnings
from functools import partial

import horovod.torch as hvd
import torch
from adapters_torch.workers.models import (
    assert_replicas_identical,
    flat,
    loss_of,
    make_model,
    on_every_rank,
    raises,
    sgd,
    wrap,
)
from worker_tools import case

import dgc.torch as dgc

_numbers = itertools.count()
SPARSE = {"sparsity": 0.99, "bucket_bytes": 40_000}


def many():
    """Steps of a run, fewer where ranks share cores."""
    return 100 if hvd.size() == 2 else 20


def both(train, *, width=128, way="b", sparse=True, optimizer=sgd, hvd_options=None, options=None, steps=None):
    """Train two copies, one with sparse updates and one without; they must stay the same after every step."""
    results, steps = [], steps or many()
    for wanted in (True, False):
        model = make_model(width=width)
        wrapped, compression = wrap(
            way,
            model,
            optimizer(model),
            hvd_options=hvd_options,
            **{**SPARSE, **(options or {})},
            sparse_updates=wanted,
        )
        after = []
        for step in range(steps):
            train(wrapped, model, step)
            after.append(flat(model).clone())
        how = compression.describe()["updates"]
        assert (how == "sparse") is (wanted and sparse), how
        results.append((after, model, wrapped, compression))
    (actual, *kept), (expected, *_) = results
    for step, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, e), f"step {step}: {(a != e).sum()} of {a.numel()} differ"
    assert not torch.equal(actual[0], actual[-1]), "nothing was trained"
    assert_replicas_identical(kept[0], f"sparse {next(_numbers)}")
    return kept


def plain(optimizer, model, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


SGDS = {
    "plain": {"momentum": 0.0},
    "momentum": {},
    "nesterov": {"nesterov": True},
    "decay": {"weight_decay": 0.01},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@case(way="ab", kind=SGDS)
def every_sgd(way, kind):
    model, _, _ = both(plain, way=way, optimizer=partial(sgd, **SGDS[kind]), steps=20 if way == "a" else many())
    dropped = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert dropped == [f"{layer}.weight" for layer in ("first", "left", "right", "last")]


def two_groups(model):
    head, others = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (head if name.startswith(("last", "left")) else others).append(p)
    first = {"params": head, "lr": 0.03, "nesterov": True, "weight_decay": 0.01}
    return torch.optim.SGD([first, {"params": others}], lr=0.1, momentum=0.9)


def without_the_second_group(optimizer, model, step):
    if step == 4:
        optimizer.param_groups.pop()
    plain(optimizer, model, step)


def other_layers_on_each_rank(optimizer, model, step):
    optimizer.zero_grad()
    loss_of(model, step, ["left", "right", "both"][(step + hvd.rank()) % 3]).backward()
    optimizer.step()


def strided(model):
    model.left.weight.data = model.left.weight.data.t().contiguous().t()
    return sgd(model)


def in_the_same_memory(model):
    model.right.weight.data = model.left.weight.data
    return sgd(model, lr=0.01)


RAMP_UP = {"rampup_begin_step": 10, "rampup_step": 20, "sparsity": [0.0, 0.75, 0.99]}
RUNS = {
    "groups with rates of their own": (plain, {"optimizer": two_groups}),
    "summed gradients": (plain, {"hvd_options": {"op": hvd.Sum}, "optimizer": lambda m: sgd(m, lr=0.02)}),
    "float32": (plain, {"options": {"values": "float32", "indices": "uint16"}, "steps": 20}),
    "int8": (plain, {"options": {"values": "int8", "indices": "uint16"}, "steps": 20}),
    "a ramp-up and unused layers": (other_layers_on_each_rank, {"options": RAMP_UP, "steps": 40}),
    "strided parameters": (plain, {"optimizer": strided, "sparse": False, "steps": 8}),
    "parameters in the same memory": (
        plain,
        {"optimizer": in_the_same_memory, "sparse": False, "steps": 10, "options": {"sparsity": 0.9}},
    ),
    "a group that is taken out": (without_the_second_group, {"optimizer": two_groups, "sparse": False, "steps": 8}),
    "the same by Horovod's": (
        without_the_second_group,
        {"way": "a", "optimizer": two_groups, "sparse": False, "steps": 8},
    ),
}


@case(run=RUNS)
def every_kind_of_run(run):
    train, options = RUNS[run]
    both(train, **options)


@case(way="ab")
def schedules_of_rate_and_momentum(way):
    schedules = {}

    def train(optimizer, model, step):
        if step == 0:
            schedules[id(optimizer)] = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.2, total_steps=many() + 1
            )
        plain(optimizer, model, step)
        schedules[id(optimizer)].step()

    both(train, way=way)


@case(way="ab")
def accumulated_gradients(way):
    def twice(optimizer, model, step):
        optimizer.zero_grad()
        for part in range(2):
            loss_of(model, 2 * step + part).backward()
        optimizer.step()

    both(twice, way=way, hvd_options={"backward_passes_per_step": 2}, steps=20)


@case(way="ab")
def clipping_after_synchronize_gets_dense_gradients(way):
    norms = []

    def train(optimizer, model, step):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        with optimizer.skip_synchronize():
            optimizer.step()

    *_, compression = both(train, way=way, sparse=False)
    assert norms[: len(norms) // 2] == norms[len(norms) // 2 :]
    assert compression.describe()["updates"] == "dense: synchronize() is called before step()"


@case(way="ab")
def now_and_then_a_look_at_the_gradients(way):
    def train(optimizer, model, step):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step % 3 == 1:
            optimizer.synchronize()
            assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()

    both(train, way=way, steps=43)  # the last step comes after one without a look


def with_closure(optimizer, model, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step(lambda: None)


def with_hook(optimizer, model, step):
    if step == 0:
        optimizer.register_step_pre_hook(lambda *_: None)
    plain(optimizer, model, step)


class Own(torch.optim.SGD):
    def step(self, closure=None):
        assert all(p.grad is not None for g in self.param_groups for p in g["params"] if p.requires_grad)
        return super().step(closure)


NEEDS = {
    "a closure": (with_closure, sgd, {}),
    "a hook": (with_hook, sgd, {}),
    "a step of its own": (plain, lambda m: Own(m.parameters(), lr=0.1, momentum=0.9), {}),
    "a rate that is a tensor": (plain, lambda m: sgd(m, lr=torch.tensor(0.1)), {}),
    "Adam": (plain, lambda m: torch.optim.Adam(m.parameters(), lr=0.01), {"error_feedback": "classic"}),
    "a loss scale": (plain, sgd, {"momentum": 0.0, "loss_scale": 1024.0}),
    "maximize": (plain, lambda m: sgd(m, momentum=0.0, maximize=True), {"momentum": 0.9}),
    "momentum of its own": (plain, sgd, {"momentum": 0.0}),
}


@case(kind=NEEDS)
def what_needs_the_dense_result_gets_it(kind):
    train, optimizer, options = NEEDS[kind]
    model, _, _ = both(train, optimizer=optimizer, options=options, sparse=False, steps=8)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@case
def a_step_that_is_refused_is_that_of_the_dense_way():
    def train(optimizer, model, step):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        (loss * math.nan if step == 5 and hvd.rank() == 0 else loss).backward()
        if step == 5:
            kept = copy.deepcopy(model.state_dict())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            assert not flat(model).isfinite().all()
            model.load_state_dict(kept)
        else:
            optimizer.step()

    both(train, steps=12)


@case
def autograd_sees_the_update():
    model = make_model()
    optimizer, _ = wrap("b", model, sgd(model), **SPARSE)
    for step in range(3):
        plain(optimizer, model, step)
    optimizer.zero_grad()
    loss = loss_of(model, 3)
    loss.backward(retain_graph=True)
    optimizer.step()
    raises(RuntimeError, "modified by an inplace operation", loss.backward)


@case
def an_error_leaves_the_next_step_whole():
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), **SPARSE)
    for step in range(3):
        plain(optimizer, model, step)
    before = flat(model).clone()

    def failing():
        optimizer.zero_grad()
        loss_of(model, 3).backward()
        if hvd.rank() == 0:
            compression.engine.exchange.fail(dgc.LayoutError("made to fail"))
        optimizer.step()

    on_every_rank(dgc.DGCError, "made to fail", failing, "sparse")
    assert torch.equal(flat(model), before), "nothing of the failed step was applied"
    compression.reset()
    for step in range(4, 8):
        plain(optimizer, model, step)
    assert_replicas_identical(model, "after an error")
    assert not torch.equal(flat(model), before)


@case
def an_exchange_in_a_later_step_holds_no_gradient_of_this_one():
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), **SPARSE)
    for step in range(3):
        plain(optimizer, model, step)
    given = [b.step.submissions for b in compression.engine.exchange._buckets]
    assert not any(given), "the gradients' memory is kept"


def clip(model):
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def own_step(optimizer, model, step):
    if step == 0:
        horovods = optimizer.step

        def step_of_the_user(self, closure=None):
            self.synchronize()
            clip(model)
            with self.skip_synchronize():
                return horovods(closure)

        step_of_the_user.__code__ = step_of_the_user.__code__.replace(co_name="step")
        optimizer.step = types.MethodType(step_of_the_user, optimizer)
    plain(optimizer, model, step)


def own_synchronize(optimizer, model, step):
    if step == 0:
        horovods = optimizer.synchronize
        optimizer.synchronize = lambda: (horovods(), clip(model))
    plain(optimizer, model, step)


def own_step_of_the_class(optimizer, model, step):
    torchs = torch.optim.SGD.step

    def clipping(self, closure=None):
        clip(model)
        return torchs(self, closure)

    torch.optim.SGD.step = clipping
    try:
        sgd(model)  # makes torch call its hooks before this step, too
        plain(optimizer, model, step)
    finally:
        torch.optim.SGD.step = torchs


LOOKS = {"step": own_step, "synchronize": own_synchronize, "step of the class": own_step_of_the_class}


@case(way="ab", by=LOOKS)
def whoever_looks_at_gradients_between_exchange_and_update_gets_the_averaged_ones(way, by):
    both(LOOKS[by], way=way, sparse=False, steps=6)


@case
def hooks_after_the_step_see_its_gradients():
    norms = []

    def train(optimizer, model, step):
        if step == 0:
            optimizer.register_step_post_hook(
                lambda *_: norms.append(sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
            )
        plain(optimizer, model, step)

    both(train, sparse=False, steps=6)
    assert norms[: len(norms) // 2] == norms[len(norms) // 2 :]


@case(way="ab")
def gradients_in_a_buffer_of_the_script_are_written_there(way):
    flats = {}

    def in_one_buffer(optimizer, model, step):
        if step == 0:
            ours = [p for p in model.parameters() if p.requires_grad]
            flats[id(optimizer)] = torch.zeros(sum(p.numel() for p in ours))
            for p, part in zip(ours, flats[id(optimizer)].split([p.numel() for p in ours]), strict=True):
                p.grad = part.view_as(p)
        flats[id(optimizer)].zero_()
        assert not any(p.grad.any() for p in model.parameters() if p.requires_grad)
        loss_of(model, step).backward()
        optimizer.step()

    *_, compression = both(in_one_buffer, way=way, optimizer=partial(sgd, lr=0.001), sparse=False, steps=10)
    assert "part of a larger tensor" in compression.describe()["updates"]


@case
def a_model_without_a_dense_tensor_gets_dense_results():
    """Nothing else would show that the script does not clear its gradients, to which dense training adds."""
    seen = []
    for wanted in (True, False):
        model = make_model(width=128)
        layer = model.first.weight
        optimizer = torch.optim.SGD([layer], lr=0.01)
        optimizer, compression = wrap(
            "b", torch.nn.ParameterList([layer]), optimizer, sparsity=0.9, sparse_updates=wanted
        )
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
        seen.append(layer.detach().clone())
        compression.close()
    assert torch.equal(*seen)


@case(way="ab")
def a_backward_pass_after_results_that_were_not_written_is_refused(way):
    """Where dense training adds to all of them."""
    model = make_model(width=128)
    optimizer, compression = wrap(way, model, sgd(model, momentum=0.0), **SPARSE)
    assert compression.describe()["updates"] == "known after the first step of this process"
    plain(optimizer, model, 0)
    assert compression.describe()["updates"] == "sparse"

    def again():
        loss_of(model, 1).backward()
        optimizer.step()

    on_every_rank(dgc.ConfigError, "give the compressor sparse_updates=False", again)

"""On 2 real ranks: gradients of every type and in every kind of memory, sparse ones, and those of tied weights."""

import copy
import time

import horovod.torch as hvd
import torch
from models import (
    EXACT,
    assert_replicas_identical,
    dense_reference,
    flat,
    loss_of,
    make_model,
    on_every_rank,
    sgd,
    train,
    worst_difference,
    wrap,
)
from torch import nn
from worker_tools import case

import dgc.torch as dgc

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def require_dense_equality(model, optimizer, reference, plain, loss, steps, bound):
    """Train; the reference on the mean of all ranks' ``loss(model, step, rank)``."""
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step, hvd.rank()).backward()
        optimizer.step()
        plain.zero_grad()
        (sum(loss(reference, step, rank) for rank in range(hvd.size())) / hvd.size()).backward()
        plain.step()
    assert worst_difference(model, reference) <= bound


# -- types -----------------------------------------------------------------------------------------------------------


@case(way="ab", dtype=TYPES)
def results_have_the_gradients_type(way, dtype):
    dtype = TYPES[dtype]
    torch.manual_seed(0)
    model = nn.Linear(40, 60).to(dtype)
    optimizer, compression = wrap(way, model, sgd(model, lr=0.05), sparsity=0.9)
    before = model.weight.detach().clone()
    for step in range(5):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        model(torch.randn(8, 40, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()
        assert model.weight.grad.dtype == dtype
    assert_replicas_identical(model)
    assert not torch.equal(before, model.weight)
    state = compression.engine.exchange.state.buckets[0].u.dtype
    assert state == ("float64" if dtype is torch.float64 else "float32")


@case(way="ab", before=("float32", "float64"))
def another_type_than_at_the_wrapping_is_an_error_that_names_the_parameter(way, before):
    before, after = (torch.float32, torch.float64)[:: 1 if before == "float32" else -1]
    model = make_model().to(before)
    optimizer, _ = wrap(way, model, sgd(model))
    model.to(after)

    def step():
        optimizer.zero_grad()
        model(torch.zeros(4, 20, dtype=after)).sum().backward()
        optimizer.step()

    on_every_rank(dgc.LayoutError, r"the gradient of '.*' is float.*before the optimizer is wrapped", step)


@case(way="ab")
def another_shape_than_at_the_wrapping_is_an_error(way):
    model = nn.Linear(40, 60)
    optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9)

    def one_step():
        if hvd.rank() == 1:
            model.weight.data = model.weight.data[:, :39].clone()
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()

    on_every_rank(dgc.LayoutError, "weight.*2340 elements.*2400", one_step)


# -- memory ----------------------------------------------------------------------------------------------------------


@case(way="ab")
def gradients_that_are_not_contiguous_equal_dense_training(way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3)).to(memory_format=torch.channels_last)
    reference = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3))
    reference.load_state_dict(model.state_dict())
    optimizer, _ = wrap(way, model, sgd(model, weight_decay=0.01), **EXACT)

    def loss(net, step, rank):
        x = torch.randn(4, 8, 9, 9, generator=torch.Generator().manual_seed(10 * step + rank))
        return net(x.to(memory_format=torch.channels_last) if net is model else x).square().mean()

    require_dense_equality(model, optimizer, reference, sgd(reference, weight_decay=0.01), loss, 4, bound=1e-4)


class Embeddings(nn.Module):
    """From step ``since`` on, positions and kinds are added as views: autograd gives both gradients the same memory."""

    def __init__(self, since=0):
        super().__init__()
        self.since = since
        generator = torch.Generator().manual_seed(0)
        self.position = nn.Parameter(torch.randn(300, 500, generator=generator))
        self.kind = nn.Parameter(torch.randn(300, 500, generator=generator))

    def loss(self, step, rank):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(300, 500, generator=generator)
        kind = self.kind if step >= self.since else self.kind * 1
        return (x * (self.position.unsqueeze(0) + kind.unsqueeze(0)).tanh()).mean() * 1000


@case(way="ab", since=(0, 3))
def gradients_that_share_memory_are_exchanged_apart(way, since):
    expected, model = Embeddings(since), Embeddings(since)
    expected.loss(since, 0).backward()
    assert expected.position.grad.data_ptr() == expected.kind.grad.data_ptr(), "find another model for this test"
    options = {"lr": 0.5, "weight_decay": 0.01}  # with decay the two results differ
    optimizer, _ = wrap(way, model, sgd(model, **options), **EXACT, bucket_bytes=1)  # a bucket for each
    require_dense_equality(model, optimizer, expected, sgd(expected, **options), Embeddings.loss, 8, bound=1e-5)


# -- tied weights ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.middle, self.out = nn.Linear(20, 40), nn.Linear(40, 20), nn.Linear(20, 40)
        self.out.weight = self.first.weight
        self.head = nn.Linear(40, 10)

    def forward(self, x, branch="both"):
        return self.head(self.out(torch.relu(self.middle(torch.relu(self.first(x))))))


@case(way="ab")
def tied_weights_equal_dense_training(way):
    model = Tied()
    expected = dense_reference(model, 5, momentum=0.9, weight_decay=0.01)
    optimizer, _ = wrap(way, model, sgd(model, weight_decay=0.01), **EXACT)
    train(optimizer, model, 5)
    assert worst_difference(model, expected) <= 1e-5
    assert model.out.weight is model.first.weight


@case
def tied_weights_may_be_named_twice():
    model = Tied()
    optimizer = sgd(model)
    compression = dgc.Compression.dgc(model.named_parameters(remove_duplicate=False), optimizer=optimizer, sparsity=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    train(optimizer, model, 1)
    assert_replicas_identical(model)
    compression.close()


# -- sparse gradients ------------------------------------------------------------------------------------------------


def make_embedding():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 40, sparse=True), nn.Flatten(), nn.Linear(160, 64))


@case(excluded=(False, True))
def sparse_gradients_are_sent_dense_if_the_script_says_so(excluded):
    """By sparse_as_dense=True or exclude=: an optimizer that wants sparse gradients gets sparse ones."""
    hvd_options, options = ({}, {"exclude": ["0.*"]}) if excluded else ({"sparse_as_dense": True}, {})
    model = make_embedding()
    inner = torch.optim.SparseAdam(list(model[0].parameters())) if excluded else sgd(model, momentum=0.0)
    optimizer, _ = wrap("b", model, inner, hvd_options=hvd_options, **options, **EXACT)
    reference = copy.deepcopy(model)
    trained = reference[0] if excluded else reference
    plain = type(inner)(list(trained.parameters()), lr=inner.defaults["lr"])

    def loss(net, step, rank):
        words = torch.randint(0, 50, (8, 4), generator=torch.Generator().manual_seed(9 * step + rank))
        return net(words).square().mean()

    require_dense_equality(model, optimizer, reference, plain, loss, 5, bound=1e-5)
    assert_replicas_identical(model)


@case(way="ab", beside_dense_ones=(False, True))
def other_sparse_gradients_are_an_error_before_anything_moves(way, beside_dense_ones):
    model = make_embedding()
    before = flat(model).clone()
    optimizer, _ = wrap(way, model, sgd(model if beside_dense_ones else model[0]), sparsity=0.9)

    def one_step():
        model(torch.randint(0, 50, (8, 4))).square().mean().backward()
        optimizer.step()

    on_every_rank(dgc.ConfigError, "'0.weight' has sparse.*sparse_as_dense=True.*exclude=", one_step)
    assert torch.equal(flat(model), before)


@case
def sparse_as_dense_of_horovods_own_optimizer_is_refused():
    model = make_model()
    optimizer, _ = wrap("a", model, sgd(model), hvd_options={"sparse_as_dense": True})
    on_every_rank(dgc.ConfigError, "sparse_as_dense", lambda: train(optimizer, model, 1))


# -- memory that autograd still reads ----------------------------------------------------------------------------------


class Slow(torch.autograd.Function):
    """Waits in the backward pass, until the exchange of the gradients that were ready before has ended."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.1)
        return gradient.clone()


class LowRank(nn.Module):
    """w + a @ b. Where ``shares``, autograd makes w's gradient of the memory that it reads for a and b afterwards."""

    def __init__(self, shares):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.w = (nn.Parameter(0.1 * torch.randn(*shape)) for shape in ((80, 8), (8, 80), (80, 80)))
        self.shares = shares

    def forward(self, x):
        w = self.w if self.shares else self.w * 1
        return x @ (Slow.apply(self.a @ self.b).view(-1) + w.view(-1)).view(80, 80)


SENT = {"all": EXACT, "some": {"sparsity": 0.99}}


@case(way="ab", sent=SENT)
def results_are_not_written_while_autograd_reads_the_gradients(way, sent):
    models = [LowRank(shares) for shares in (True, False)]
    for model in models:
        optimizer, compression = wrap(way, model, sgd(model), **SENT[sent], bucket_bytes=1)
        for step in range(3):
            optimizer.zero_grad()
            model(
                torch.randn(16, 80, generator=torch.Generator().manual_seed(9 * step + hvd.rank()))
            ).square().mean().backward()
            optimizer.step()
        compression.close()
    assert torch.equal(*map(flat, models))


@case(way="ab")
def gradients_in_a_buffer_of_the_script_get_their_results_there(way):
    model = make_model()
    expected = dense_reference(model, 4, lr=0.01, momentum=0.9)
    optimizer, _ = wrap(way, model, sgd(model, lr=0.01), **EXACT)
    trained = [p for p in model.parameters() if p.requires_grad]
    buffer = torch.zeros(sum(p.numel() for p in trained))
    for p, part in zip(trained, buffer.split([p.numel() for p in trained]), strict=True):
        p.grad = part.view_as(p)
    for step in range(4):
        buffer.zero_()
        loss_of(model, step).backward()
        optimizer.step()
        assert all(p.grad.untyped_storage().data_ptr() == buffer.data_ptr() for p in trained)
    assert worst_difference(model, expected) <= 1e-5

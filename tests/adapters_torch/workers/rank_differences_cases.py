"""Ranks that mean different things, or train different models: one error on both, before anything moves."""

import horovod.torch as hvd
import torch
from models import assert_replicas_identical, loss_of, make_model, on_every_rank, sgd, train, wrap
from worker_tools import case, close_later

import dgc.torch as dgc


def layers(**sizes):
    return torch.nn.ModuleDict({name: torch.nn.Linear(40, size) for name, size in sizes.items()})


MODELS = {
    "shapes": (lambda rank: layers(a=40, b=50 + rank), r"b\.weight.*50.*51"),
    "names": (lambda rank: layers(**{"a": 40, f"b{rank}": 40}), r"b0\.weight"),
    "types": (
        lambda rank: torch.nn.Linear(40, 40).to(torch.float64 if rank else torch.float32),
        "weight.*float32.*float64",
    ),
    "number": (lambda rank: layers(**{"a": 40, **({"c": 40} if rank else {})}), r"c\.(weight|bias)"),
}


@case(way="ab", of=MODELS)
def parameters(way, of):
    make, match = MODELS[of]
    model = make(hvd.rank())
    on_every_rank(dgc.LayoutError, match, lambda: wrap(way, model, sgd(model)))


OPTIONS = {
    "sparsity": ((0.9, 0.99), "sparsity.*0.9.*0.99"),
    "values": (("float16", "float32"), "values.*float16.*float32"),
    "rampup_step": ((1, 2), "rampup_step.*1.*2"),
    "transport": (("mpi", "auto"), "transport"),
}


@case(way="ab", name=OPTIONS)
def options_of_the_compressor(way, name):
    values, match = OPTIONS[name]
    model = make_model()
    on_every_rank(dgc.ConfigError, match, lambda: wrap(way, model, sgd(model), **{name: values[hvd.rank()]}))


@case(way="ab")
def momentum_of_the_optimizer(way):
    model = make_model()
    different = sgd(model, momentum=0.9 - 0.1 * hvd.rank())
    on_every_rank(dgc.LayoutError, "momentum=0.9.*momentum=0.8", lambda: wrap(way, model, different))


ADAMW = {"eps": (1e-8, 1e-6), "weight_decay": (0.1, 0.01), "betas": ((0.9, 0.99), (0.9, 0.999))}


@case(way="ab", name=ADAMW)
def options_that_the_optimizer_applies_itself(way, name):
    model = make_model()
    different = torch.optim.AdamW(model.parameters(), **{name: ADAMW[name][hvd.rank()]})
    optimizer, _ = wrap(way, model, different, sparsity=0.9)
    before = [p.detach().clone() for p in model.parameters()]
    on_every_rank(dgc.ConfigError, f"'{name} of group 0' is .* on rank 0", lambda: train(optimizer, model, 1))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@case(way="ab")
def compressors(way):
    model = make_model()
    make = dgc.Compression.topk if hvd.rank() else dgc.Compression.dgc

    def wrapped():
        optimizer = sgd(model)
        if way == "a":
            return make(model.named_parameters(), optimizer)
        return dgc.DistributedOptimizer(optimizer, model.named_parameters(), make())

    on_every_rank(dgc.ConfigError, '\'algorithm\' is "dgc" on rank 0 and "topk" on rank 1', wrapped)


@case(without=(0, 1), kind=(None, "none"))
def a_compressor_on_one_rank_alone(without, kind):
    none = None if kind is None else dgc.Compression.none
    given = none if hvd.rank() == without else dgc.Compression.dgc()
    match = f"rank {without} has no compressor of dgc's, and rank {1 - without} has one; .*the same compression="
    on_every_rank(dgc.ConfigError, match, lambda: dgc.DistributedOptimizer(sgd(make_model()), compression=given))
    model = make_model()
    train(dgc.DistributedOptimizer(sgd(model)), model, 1)


@case
def a_first_gradient_that_belongs_to_no_parameter_of_the_compressor():
    """The other rank finds it, too, when it has to fill in the gradient that only one has computed."""
    model, stranger = make_model(), torch.nn.Linear(40, 40)
    everything = [*model.named_parameters(), *((f"stranger.{n}", p) for n, p in stranger.named_parameters())]
    compression = close_later(dgc.Compression.dgc(model.named_parameters(), optimizer=sgd(model)))
    both = torch.optim.SGD([p for _, p in everything], lr=0.1)
    optimizer = hvd.DistributedOptimizer(both, named_parameters=everything, compression=compression)

    def step():
        (stranger(torch.randn(4, 40)).sum() if hvd.rank() == 1 else loss_of(model, 0)).backward()
        optimizer.step()

    match = "^rank [01] failed in step 0: Horovod passed a gradient that belongs to no parameter"
    on_every_rank(dgc.LayoutError, match, step)


@case
def sparse_gradients_of_a_rank_whose_refused_one_is_the_first_of_its_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 50))
    optimizer, compression = wrap("b", model, sgd(model, momentum=0.0), sparsity=0.9)

    def step(embeds):
        optimizer.zero_grad()
        model[1](model[0](torch.tensor([1, 2, 3])) if embeds else torch.ones(3, 8)).square().sum().backward()
        optimizer.step()

    step(embeds=False)
    match = "^rank 1 failed in step 1: '0.weight' has sparse gradients"
    on_every_rank(dgc.ConfigError, match, lambda: step(embeds=hvd.rank() == 1))
    compression.reset()
    step(embeds=False)
    assert_replicas_identical(model)


@case(way="ab")
def models_that_were_never_broadcast(way):
    """The mean of gradients of different models fits none of them: the first step is the last."""
    model = make_model(seed=1 + hvd.rank())
    before = [p.detach().clone() for p in model.parameters()]
    optimizer, _ = wrap(way, model, sgd(model))
    error = on_every_rank(dgc.ConfigError, "do not train the same", lambda: train(optimizer, model, 1))
    assert "hvd.broadcast_parameters" in str(error)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "nothing was applied"

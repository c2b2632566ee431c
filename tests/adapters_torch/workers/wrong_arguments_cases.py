"""Arguments that are wrong, on 2 real ranks: one error on every rank, and the next call is like a first one."""

import horovod.torch as hvd
import pytest
import torch
from models import flat, make_model, on_every_rank, sgd, train, wrap
from worker_tools import case, close_later

import dgc.torch as dgc

ERRORS = (dgc.ConfigError, TypeError, dgc.RemoteError)


def wrapped(model=None, **arguments):
    model = model or make_model()
    given = {
        "optimizer": sgd(model),
        "named_parameters": model.named_parameters(),
        "compression": dgc.Compression.dgc(),
    }
    return dgc.DistributedOptimizer(**{**given, **arguments})


# -- of one rank alone -----------------------------------------------------------------------------------------------

# The last three are Horovod's where it sends dense.
OF_THE_WRAPPER = {
    "give a hvd.ProcessSet": lambda _: {"process_set": 1},
    "were not named": lambda model: {"named_parameters": list(model.named_parameters())[1:]},
    "must be unique": lambda model: {"named_parameters": [("twice", p) for p in model.parameters()]},
    "sequence of tuples": lambda model: {"named_parameters": model.state_dict()},
    "backward_passes_per_step is 0": lambda _: {"backward_passes_per_step": 0},
    "op is 'max'": lambda _: {"op": "max"},
    "compression is 'topk'": lambda _: {"compression": "topk"},
    "give a torch.optim.Optimizer": lambda _: {"optimizer": None},
    "gradient_predivide_factor": lambda _: {"gradient_predivide_factor": -1.0},
    "groups and num_groups": lambda _: {"groups": 2},
    "Adasum": lambda _: {"op": hvd.Adasum},
}


@case(dense=(False, True), rank=(0, 1))
def of_the_wrapper_on_one_rank_alone(dense, rank):
    for match, wrong in list(OF_THE_WRAPPER.items())[: -3 if dense else None]:
        model = make_model()
        given = {"optimizer": sgd(model), "compression": dgc.Compression.none if dense else dgc.Compression.dgc()}
        optimizer = given["optimizer"]
        given.update(wrong(model) if hvd.rank() == rank else {})
        error = on_every_rank(dgc.ConfigError, match, lambda g=given, m=model: wrapped(model=m, **g))
        assert hvd.rank() == rank or str(error).startswith(f"rank {rank}: "), error
        assert optimizer.param_groups[0]["momentum"] == 0.9, "a refused call must not take the momentum"
    model = make_model()
    train(wrapped(model=model), model, 1)


OF_THE_COMPRESSOR = {
    "sparsity": {"sparsity": 2.0},
    "steps is -1": {"steps": -1},
    "did you mean sparsity": {"spartsity": 0.9},
    "also needs optimizer=": {"optimizer": None},
    "optimizer is 3": {"optimizer": 3},
    "nothing to compress": {"parameters": []},
    "pairs": {"parameters": [1]},
    "op is 'max'": {"op": "max"},
    "transport must be": {"transport": 1},
}


@case
def of_the_compressor_on_one_rank_alone():
    def bind(wrong):
        model = make_model()
        given = {"parameters": model.named_parameters(), "optimizer": sgd(model)}
        dgc.Compression.dgc(**{**given, **(wrong if hvd.rank() == 1 else {})})

    for match, wrong in OF_THE_COMPRESSOR.items():
        on_every_rank(ERRORS, match, lambda wrong=wrong: bind(wrong))
    model = make_model()
    train(wrap("a", model, sgd(model))[0], model, 1)


@case
def a_compressor_that_is_bound_already_on_one_rank_alone():
    other = make_model(1)
    used = wrap("b", other, sgd(other))[1]
    given = used if hvd.rank() == 1 else dgc.Compression.dgc()
    on_every_rank(dgc.ConfigError, "already bound to a model", lambda: wrapped(compression=given))


@case(way="ab", option=("dampening", "maximize"))
def variants_of_sgd_on_one_rank_alone(way, option):
    """It fails while it builds: the others must not wait for it."""
    model = make_model()
    optimizer = sgd(model, **{option: 0.1 if option == "dampening" else True} if hvd.rank() == 1 else {})
    on_every_rank(dgc.ConfigError, option, lambda: wrap(way, model, optimizer))


@case
def names_that_are_missing_on_one_rank():
    model = make_model()
    named = list(model.named_parameters())[hvd.rank() :]
    on_every_rank(dgc.LayoutError, "have no name", lambda: dgc.Compression.dgc(named, optimizer=sgd(model)))


# -- of all ranks ----------------------------------------------------------------------------------------------------


@case
def of_the_wrapper_on_all_ranks():
    for match, wrong in (
        ("backward_passes_per_step", {"backward_passes_per_step": "2"}),
        ("backward_passes_per_step", {"backward_passes_per_step": True}),
        ("gradient_predivide_factor", {"gradient_predivide_factor": 0.0}),
        ("gradient_predivide_factor", {"gradient_predivide_factor": "2"}),
        ("gradient_predivide_factor", {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
        ("pass it by its name", {"named_parameters": dgc.Compression.dgc(), "compression": None}),
    ):
        on_every_rank(dgc.ConfigError, match, lambda wrong=wrong: wrapped(**wrong))


@case
def an_optimizer_that_is_distributed_already():
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model))
    for given in (dgc.Compression.dgc(), None):
        on_every_rank(
            dgc.ConfigError, "distributed already", lambda g=given: wrapped(optimizer=optimizer, compression=g)
        )
    assert optimizer.compression is compression


@case
def of_the_compressor_on_all_ranks():
    model = make_model()
    for match, make in (
        ("named_parameters", lambda: dgc.Compression.dgc(0.999)),
        ("named_parameters", lambda: dgc.Compression.dgc(model.parameters(), sgd(model))),
        ("named_parameters", lambda: dgc.Compression.dgc(optimizer=sgd(model))),
        ("loss_scale", lambda: dgc.Compression.dgc(loss_scale="much")),
    ):
        on_every_rank(dgc.ConfigError, match, make)


@case(way="ab", kind=("SGD", "RMSprop"))
def momentum_in_the_optimizer_and_in_the_compressor(way, kind):
    model = make_model()
    optimizer = sgd(model) if kind == "SGD" else torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)
    on_every_rank(dgc.ConfigError, "momentum would be applied twice", lambda: wrap(way, model, optimizer, momentum=0.9))


@case(way="ab")
def weight_decay_in_the_optimizer_and_in_the_compressor(way):
    model = make_model()
    twice = lambda: wrap(way, model, sgd(model, momentum=0, weight_decay=0.1), momentum=0.9, weight_decay=0.1)  # noqa: E731
    on_every_rank(dgc.ConfigError, "weight decay would be applied twice", twice)


@case
def adasum():
    model = make_model()
    for way in "ab":
        adasum = {"op": hvd.Adasum}
        on_every_rank(dgc.ConfigError, "Adasum", lambda w=way, a=adasum: wrap(w, model, sgd(model), hvd_options=a))
    on_every_rank(dgc.ConfigError, "Adasum", lambda: dgc.Compression.dgc(op=hvd.Adasum))
    before = flat(model)
    compression = close_later(dgc.Compression.dgc(model.named_parameters(), momentum=0.9))  # knows no optimizer yet
    plain, named = sgd(model, momentum=0.0), model.named_parameters()
    optimizer = hvd.DistributedOptimizer(plain, named, compression=compression, op=hvd.Adasum)
    on_every_rank(dgc.ConfigError, "Adasum", lambda: train(optimizer, model, 1))
    assert torch.equal(flat(model), before), "the weights have moved"


@case
def an_op_that_only_one_of_optimizer_and_compressor_was_given():
    for match, options in (
        ("op=hvd.Sum", {"hvd_options": {"op": hvd.Sum}}),
        ("averages", {"op": hvd.Sum}),
    ):
        model = make_model()
        optimizer, _ = wrap("a", model, sgd(model), **options)
        on_every_rank(dgc.ConfigError, match, lambda o=optimizer, m=model: train(o, m, 1))
    both = {"op": hvd.Sum, "hvd_options": {"op": hvd.Average}}
    on_every_rank(dgc.ConfigError, "pass the same", lambda: wrap("b", model, sgd(model), **both))


# -- the wrong object ------------------------------------------------------------------------------------------------

UNCALLED = {"class": dgc.DGCCompressor, "dgc": dgc.Compression.dgc, "topk": dgc.Compression.topk}
NO_COMPRESSOR = r"which is no compressor; call one: compression=Compression\."


@case
def what_is_no_compressor():
    for wrong in (*UNCALLED.values(), "dgc", dgc.Compression, 3):
        on_every_rank(dgc.ConfigError, NO_COMPRESSOR, lambda wrong=wrong: wrapped(compression=wrong))
    for wrong in UNCALLED.values():  # Horovod's own wrapper looks at it in the first step
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression=wrong)
        on_every_rank(dgc.ConfigError, NO_COMPRESSOR, lambda o=optimizer, m=model: train(o, m, 1))


@case
def a_compressor_of_horovods_optimizer_without_parameters():
    model = make_model()
    unbound = dgc.Compression.dgc(sparsity=0.9)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), compression=unbound)
    on_every_rank(dgc.ConfigError, "was given no parameters", lambda: train(optimizer, model, 1))


@case
def an_object_in_the_wrong_place_is_named_in_one_line():
    model = make_model()
    optimizer = sgd(model)
    for wrong in (
        lambda: dgc.Compression.dgc(optimizer),
        lambda: dgc.DistributedOptimizer(optimizer, compression=model),
        lambda: dgc.DistributedOptimizer(model),
        lambda: dgc.DistributedOptimizer(optimizer, model.named_parameters(), None, model),
        lambda: dgc.Compression.dgc(model.named_parameters(), optimizer=model),
    ):
        error = on_every_rank(dgc.ConfigError, "of class (Net|SGD)", wrong)
        assert "\n" not in str(error), error
        assert len(str(error)) < 250, error


@case(way="ab")
def a_generator_of_names_that_was_used_up(way):
    model = make_model()
    optimizer, names = sgd(model), model.named_parameters()
    compression = close_later(dgc.Compression.dgc(*((names, optimizer) if way == "a" else ())))
    library = hvd if way == "a" else dgc
    list(names)
    again = lambda: library.DistributedOptimizer(optimizer, names, compression=compression)  # noqa: E731
    on_every_rank(ValueError, "were not named", again)  # Horovod's, of its own optimizer
    optimizer = library.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    train(optimizer, model, 1)
    on_every_rank(dgc.ConfigError, "once only", lambda: dgc.Compression.dgc(names, momentum=0.0))


@case
def a_compressor_for_two_models():
    model, other = make_model(), make_model(seed=1)
    _, compression = wrap("b", model, sgd(model), sparsity=0.9)
    on_every_rank(dgc.ConfigError, "one compressor", lambda: wrapped(model=other, compression=compression))
    model = make_model()
    compression = close_later(dgc.Compression.dgc(model.named_parameters(), optimizer=sgd(model)))
    plain = sgd(other, momentum=0.0)
    second = hvd.DistributedOptimizer(plain, named_parameters=other.named_parameters(), compression=compression)
    on_every_rank(dgc.LayoutError, "share the compressor", lambda: train(second, other, 1))


@case
def elastic_horovod():
    model = make_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_ELASTIC", "1")
        for make in (
            lambda: wrap("a", model, sgd(model)),
            lambda: wrap("b", model, sgd(model)),
            lambda: dgc.DGCMomentum(model.parameters(), 0.1, 0.9, 0),
            lambda: dgc.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1),
        ):
            on_every_rank(dgc.ConfigError, "elastic", make)


# -- what a refused call leaves --------------------------------------------------------------------------------------


@case
def a_refused_construction_takes_nothing():
    model = make_model()
    groups = [
        {"params": model.first.parameters(), "momentum": 0.9, "weight_decay": 0.1},
        {"params": model.last.parameters(), "momentum": 0.9, "dampening": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    on_every_rank(dgc.ConfigError, "dampening", lambda: wrap("a", model, optimizer))
    assert [g["momentum"] for g in optimizer.param_groups] == [0.9, 0.9]
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    different = sgd(model, momentum=0.9 - 0.1 * hvd.rank())
    on_every_rank(dgc.LayoutError, "momentum", lambda: wrap("a", model, different))
    assert different.param_groups[0]["momentum"] == 0.9 - 0.1 * hvd.rank()


@case(way="ab")
def a_refused_wrapping_leaves_the_next_ones_gradients_alone(way):
    ends = []
    for mistake in (False, True):
        model = make_model()
        if mistake:
            on_every_rank(dgc.ConfigError, "dampening", lambda m=model: wrap("b", m, sgd(m, dampening=0.5)))
        optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9)
        train(optimizer, model, 5)
        ends.append(flat(model))
    assert torch.equal(*ends)

"""Bad input on 2 real ranks: one clear error on every rank, within seconds, and the job goes on to the next case."""

from __future__ import annotations

import itertools
import os
import time

import horovod.torch as hvd
import torch
from adapters_torch.workers.tensors import WRONG
from models import (
    assert_replicas_identical,
    each_way,
    flat,
    loss_of,
    make_model,
    on_every_rank,
    raises,
    sgd,
    train,
    wrap,
)
from worker_tools import case, run_cases

import dgc.torch as dgc


@case
def adasum():
    model = make_model()
    on_every_rank(dgc.ConfigError, "Adasum", lambda: wrap("b", model, sgd(model), hvd_options={"op": hvd.Adasum}))
    on_every_rank(dgc.ConfigError, "Adasum", lambda: dgc.Compression.dgc(op=hvd.Adasum), "option")
    before = flat(model)
    on_every_rank(dgc.ConfigError, "Adasum", lambda: wrap("a", model, sgd(model), hvd_options={"op": hvd.Adasum}), "a")
    compression = dgc.Compression.dgc(model.named_parameters(), momentum=0.9)  # which does not know the optimizer yet
    plain, named = sgd(model, momentum=0.0), model.named_parameters()
    optimizer = hvd.DistributedOptimizer(plain, named, compression=compression, op=hvd.Adasum)
    on_every_rank(dgc.ConfigError, "Adasum", lambda: train(optimizer, model, 1), "a without the optimizer")
    assert torch.equal(flat(model), before), "the weights have moved"
    compression.close()


WRONG_WITH_HOROVOD = {
    "give a hvd.ProcessSet": lambda _: {"process_set": 1},
    **WRONG,
    "Adasum": lambda _: {"op": hvd.Adasum},
}
"""The last three are Horovod's where it sends dense."""


@case
def arguments_that_are_wrong_on_one_rank_alone():
    for dense, rank in itertools.product((False, True), range(hvd.size())):
        for match, wrong in list(WRONG_WITH_HOROVOD.items())[: -3 if dense else None]:
            model = make_model()
            given = {
                "optimizer": sgd(model),
                "named_parameters": model.named_parameters(),
                "compression": dgc.Compression.none if dense else dgc.Compression.dgc(),
            }
            optimizer = given["optimizer"]
            given.update(wrong(model) if hvd.rank() == rank else {})
            wrapped = lambda given=given: dgc.DistributedOptimizer(**given)  # noqa: E731
            error = on_every_rank(dgc.ConfigError, match, wrapped, f"{dense} {rank}")
            assert hvd.rank() == rank or str(error).startswith(f"rank {rank}: "), error
            assert optimizer.param_groups[0]["momentum"] == 0.9, "a refused call must not take the momentum"
    model = make_model()
    train(wrap("b", model, sgd(model))[0], model, 1)


@case
def arguments_of_a_compressor_that_are_wrong_on_one_rank_alone():
    def bind(wrong):
        model = make_model()
        given = {"parameters": model.named_parameters(), "optimizer": sgd(model)}
        dgc.Compression.dgc(**{**given, **(wrong if hvd.rank() == 1 else {})})

    for match, wrong in {
        "sparsity": {"sparsity": 2.0},
        "steps is -1": {"steps": -1},
        "did you mean sparsity": {"spartsity": 0.9},
        "also needs optimizer=": {"optimizer": None},
        "optimizer is 3": {"optimizer": 3},
        "nothing to compress": {"parameters": []},
        "pairs": {"parameters": [1]},
        "op is 'max'": {"op": "max"},
        "transport must be": {"transport": 1},
    }.items():
        on_every_rank((dgc.ConfigError, TypeError, dgc.RemoteError), match, lambda wrong=wrong: bind(wrong))
    model = make_model()
    used = wrap("b", other := make_model(1), sgd(other))[1]
    given = used if hvd.rank() == 1 else dgc.Compression.dgc()
    on_every_rank(
        dgc.ConfigError, "already bound to a model", lambda: dgc.DistributedOptimizer(sgd(model), compression=given)
    )
    train(wrap("a", model, sgd(model))[0], model, 1)


@case
def a_state_refused_between_backward_and_step():
    for way, model, optimizer, compression in each_way(sparsity=0.9):
        train(optimizer, model, 2)
        good, before = compression.state_dict(), flat(model)
        bad = {**good, "parameters": {"other": next(iter(good["parameters"].values()))}}
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        hvd.allreduce(torch.zeros(1), name=f"all have handed over {way}")
        on_every_rank(dgc.LayoutError, "", lambda: compression.load_state_dict(bad), way)  # noqa: B023
        on_every_rank(dgc.RemoteError, "was given up by .* call reset", optimizer.step, way)
        assert torch.equal(flat(model), before)
        compression.load_state_dict(good)
        if way == "b":
            train(optimizer, model, 2, start=2)
            assert_replicas_identical(model, "after the state was loaded")


@case
def an_exception_between_backward_and_step_under_horovods_optimizer():
    """On one rank alone, while the other makes the update, and on all: these go on together, or not, by chance."""

    def outcome(optimizer, model):
        try:
            train(optimizer, model, 2, start=3)
        except dgc.ConfigError as error:
            return str(error)
        return "goes on"

    for failing in ([0], [1], [0, 1]):
        model = make_model()
        optimizer, compression = wrap("a", model, sgd(model), sparsity=0.9)
        train(optimizer, model, 2)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        if hvd.rank() not in failing:
            optimizer.step()
        hvd.allreduce(torch.zeros(1), name="together")  # the others have made their update
        compression.reset()
        outcomes = hvd.allgather_object(outcome(optimizer, model), name=f"outcomes {failing}")
        assert len(set(outcomes)) == 1, outcomes
        if len(failing) == 1:
            assert "do not train the same model" in outcomes[0], outcomes
        elif outcomes[0] == "goes on":
            assert_replicas_identical(model, f"{failing}")
        else:
            assert "cannot take back" in outcomes[0], outcomes
        compression.close()


@case
def a_gradient_changed_on_one_rank_when_all_buckets_may_be_through():
    for way, bucket_bytes in itertools.product("ab", (1, 2**25)):
        model = make_model()
        optimizer, compression = wrap(way, model, sgd(model), sparsity=0.9, bucket_bytes=bucket_bytes)
        train(optimizer, model, 2)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        time.sleep(1.0)
        if hvd.rank() == 1:
            model.last.weight.grad.mul_(2.0)
        changed = dgc.LayoutError, "last.weight.* was changed or replaced"
        if way == "b":
            on_every_rank(*changed, optimizer.step, f"{way} {bucket_bytes}")
        elif hvd.rank() == 1:
            raises(*changed, optimizer.step)
        else:  # has what it waits for, and hears of an error in the next step
            optimizer.step()
        compression.reset()
        optimizer.zero_grad()
        if way == "b":
            train(optimizer, model, 2)
        else:  # one rank has made a step that another has not
            different = dgc.ConfigError, "do not train the same model"
            on_every_rank(*different, lambda: train(optimizer, model, 1), f"{way} {bucket_bytes}")  # noqa: B023
        compression.close()


@case
def sum_that_the_compressor_was_not_told_of():
    model = make_model()
    optimizer, compression = wrap("a", model, sgd(model), hvd_options={"op": hvd.Sum})
    on_every_rank(dgc.ConfigError, "op=hvd.Sum", lambda: train(optimizer, model, 1))
    compression.close()
    model = make_model()
    optimizer, compression = wrap("a", model, sgd(model), op=hvd.Sum)
    on_every_rank(dgc.ConfigError, "averages", lambda: train(optimizer, model, 1), "reverse")
    compression.close()
    on_every_rank(
        dgc.ConfigError,
        "pass the same",
        lambda: wrap("b", model, sgd(model), op=hvd.Sum, hvd_options={"op": hvd.Average}),
    )


@case
def no_backward_passes_with_way_a():
    """Horovod itself says so."""
    model = make_model()
    optimizer = sgd(model)
    compression = dgc.Compression.dgc(model.named_parameters(), optimizer=optimizer)
    for options in ({"backward_passes_per_step": 0}, {}):

        def wrapped(options=options):
            return hvd.DistributedOptimizer(
                optimizer, named_parameters=model.named_parameters(), compression=compression, **options
            )

        if options:
            on_every_rank(ValueError, "backward_passes_per_step must be > 0", wrapped, "a")
        else:
            train(wrapped(), model, 2)
    compression.close()


@case
def sparse_as_dense_with_way_a():
    model = make_model()
    optimizer, _ = wrap("a", model, sgd(model), hvd_options={"sparse_as_dense": True})
    on_every_rank(dgc.ConfigError, "sparse_as_dense", lambda: train(optimizer, model, 1))


@case
def momentum_twice():
    model = make_model()
    for way in "ab":
        for optimizer in (sgd(model), torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)):
            twice = lambda way=way, o=optimizer: wrap(way, model, o, momentum=0.9)  # noqa: E731
            on_every_rank(dgc.ConfigError, "applied twice", twice, way)
        on_every_rank(
            dgc.ConfigError,
            "weight decay would be applied twice",
            lambda way=way: wrap(way, model, sgd(model, momentum=0, weight_decay=0.1), momentum=0.9, weight_decay=0.1),
            way,
        )


@case
def dampening_and_maximize_on_one_rank_alone():
    """It fails while it builds: the others must not wait for it."""
    model = make_model()
    for way, options in itertools.product("ab", ({"dampening": 0.1}, {"maximize": True})):
        optimizer = sgd(model, **options if hvd.rank() == 1 else {})
        on_every_rank(dgc.ConfigError, next(iter(options)), lambda w=way, o=optimizer: wrap(w, model, o), way)


@case
def sparse_gradients():
    """Beside dense ones, and alone; before anything has moved."""
    for way in "ab":
        for whole in (True, False):
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Embedding(50, 40, sparse=True), torch.nn.Flatten(), torch.nn.Linear(160, 64)
            )
            before = flat(model).clone()
            optimizer, _ = wrap(way, model, sgd(model if whole else model[0]), sparsity=0.9)

            def one_step(model=model, optimizer=optimizer):
                model(torch.randint(0, 50, (8, 4))).square().mean().backward()
                optimizer.step()

            on_every_rank(dgc.ConfigError, "'0.weight' has sparse.*sparse_as_dense=True.*exclude=", one_step, way)
            assert torch.equal(flat(model), before)


@case
def one_compressor_shared_by_two_models_in_way_a():
    model, other = make_model(), make_model(seed=1)
    compression = dgc.Compression.dgc(model.named_parameters(), optimizer=sgd(model))
    second = hvd.DistributedOptimizer(
        torch.optim.SGD(other.parameters(), lr=0.1), named_parameters=other.named_parameters(), compression=compression
    )
    on_every_rank(dgc.LayoutError, "share the compressor", lambda: train(second, other, 1))
    compression.close()


@case
def a_changed_shape():
    for way in "ab":
        model = torch.nn.Linear(40, 60)
        optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9)

        def one_step(model=model, optimizer=optimizer):
            if hvd.rank() == 1:
                model.weight.data = model.weight.data[:, :39].clone()
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()

        on_every_rank(dgc.LayoutError, "weight.*2340 elements.*2400", one_step, way)


@case
def parameters_that_differ_between_ranks():
    for way in "ab":
        rank = hvd.rank()
        shape = torch.nn.ModuleDict({"a": torch.nn.Linear(40, 40), "b": torch.nn.Linear(40, 50 + rank)})
        on_every_rank(dgc.LayoutError, r"b\.weight.*50.*51", lambda way=way, m=shape: wrap(way, m, sgd(m)), way)
        names = torch.nn.ModuleDict({"a": torch.nn.Linear(40, 40), f"b{rank}": torch.nn.Linear(40, 40)})
        on_every_rank(dgc.LayoutError, r"b0\.weight", lambda way=way, m=names: wrap(way, m, sgd(m)), way)
        types = torch.nn.Linear(40, 40).to(torch.float64 if rank else torch.float32)
        on_every_rank(dgc.LayoutError, "weight.*float32.*float64", lambda way=way, m=types: wrap(way, m, sgd(m)), way)
        more = torch.nn.ModuleDict({"a": torch.nn.Linear(40, 40), **({"c": torch.nn.Linear(40, 40)} if rank else {})})
        on_every_rank(dgc.LayoutError, r"c\.(weight|bias)", lambda way=way, m=more: wrap(way, m, sgd(m)), way)


@case
def options_that_differ_between_ranks():
    model = make_model()
    for way in "ab":
        for name, values in {"sparsity": (0.9, 0.99), "values": ("float16", "float32"), "rampup_step": (1, 2)}.items():
            on_every_rank(
                dgc.ConfigError,
                f"{name}.*{values[0]}.*{values[1]}",
                lambda way=way, name=name, values=values: wrap(way, model, sgd(model), **{name: values[hvd.rank()]}),
                way,
            )
        on_every_rank(
            dgc.LayoutError,
            "momentum=0.9.*momentum=0.8",
            lambda way=way: wrap(way, model, sgd(model, momentum=0.9 - 0.1 * hvd.rank())),
            way,
        )
        on_every_rank(
            dgc.ConfigError,
            "transport",
            lambda way=way: wrap(way, model, sgd(model), transport=("mpi", "auto")[hvd.rank()]),
            way,
        )


@case
def compressors_that_differ_between_ranks():
    for way in "ab":
        model = make_model()

        def wrapped(way=way, model=model):
            optimizer = sgd(model)
            make = dgc.Compression.topk if hvd.rank() else dgc.Compression.dgc
            if way == "a":
                return make(model.named_parameters(), optimizer)
            return dgc.DistributedOptimizer(optimizer, model.named_parameters(), make())

        on_every_rank(dgc.ConfigError, '\'algorithm\' is "dgc" on rank 0 and "topk" on rank 1', wrapped, way)
    for without in (0, 1):
        for none in (None, dgc.Compression.none):
            given = none if hvd.rank() == without else dgc.Compression.dgc()
            on_every_rank(
                dgc.ConfigError,
                f"rank {without} has no compressor of dgc's, and rank {1 - without} has one; .*the same compression=",
                lambda given=given: dgc.DistributedOptimizer(sgd(make_model()), compression=given),
                f"{without} {none}",
            )
    model = make_model()
    train(dgc.DistributedOptimizer(sgd(model)), model, 1)


@case
def momentum_that_differs_between_ranks_in_a_step():
    for way, model, optimizer, _ in each_way(sparsity=0.9):
        train(optimizer, model, 2)
        optimizer.param_groups[0]["momentum"] = 0.5 + 0.1 * hvd.rank()
        on_every_rank(dgc.ConfigError, "disagree in step 2", lambda o=optimizer, m=model: train(o, m, 1), way)


@case
def missing_arguments():
    model = make_model()
    on_every_rank(dgc.ConfigError, "optimizer=", lambda: dgc.Compression.dgc(model.named_parameters()))
    on_every_rank(dgc.ConfigError, "named_parameters", lambda: dgc.Compression.dgc(optimizer=sgd(model)))
    unbound = dgc.Compression.dgc(sparsity=0.9)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), compression=unbound)
    on_every_rank(dgc.ConfigError, "was given no parameters", lambda: train(optimizer, model, 1))


@case
def a_checkpoint_of_another_layout_or_number_of_ranks():
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), sparsity=0.9)
    train(optimizer, model, 2)
    state = compression.state_dict()
    on_every_rank(dgc.LayoutError, "resize=True", lambda: compression.load_state_dict({**state, "size": 3}))
    on_every_rank(dgc.LayoutError, "all 2 old ranks", lambda: compression.load_state_dict([state], resize=True))
    other = make_model(width=32)
    _, another = wrap("b", other, sgd(other), sparsity=0.9)
    on_every_rank(
        dgc.LayoutError, "sparsified when the state was saved|another model", lambda: another.load_state_dict(state)
    )
    train(optimizer, model, 1)


@case
def what_is_no_compressor():
    model = make_model()
    uncalled = dgc.DGCCompressor, dgc.Compression.dgc, dgc.Compression.topk
    for place, wrong in enumerate((*uncalled, "dgc", dgc.Compression, 3)):
        on_every_rank(
            dgc.ConfigError,
            r"which is no compressor; call one: compression=Compression\.",
            lambda wrong=wrong: dgc.DistributedOptimizer(sgd(model), model.named_parameters(), compression=wrong),
            str(place),
        )
    for wrong in uncalled:  # Horovod's own wrapper looks at it in the first step
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression=wrong)
        text = "which is no compressor; call one: compression=Compression."
        on_every_rank(dgc.ConfigError, text, lambda o=optimizer, m=model: train(o, m, 1), wrong.__name__)
    on_every_rank(dgc.ConfigError, "optimizer is 'sgd'", lambda: dgc.Compression.dgc((), optimizer="sgd"), "optimizer")


@case
def an_optimizer_that_is_wrapped_twice():
    for first in "ab":
        model = make_model()
        plain = sgd(model)
        if first == "a":
            both = [wrap("a", model, plain), wrap("a", model, plain)]
        else:
            both = [wrap("b", model, plain), wrap("a", model, sgd(model))]
        text = "two distributed optimizers exchange the gradients of one backward pass.*wrap one optimizer, once"
        on_every_rank(dgc.ConfigError, text, lambda b=both, m=model: train(b[1][0], m, 1), first)
        for _, compression in both:
            compression.close()


@case
def a_generator_of_names_that_was_used_up():
    for way in "ab":
        model = make_model()
        optimizer, named_parameters = sgd(model), model.named_parameters()
        compression = dgc.Compression.dgc(*((named_parameters, optimizer) if way == "a" else ()))
        library = hvd if way == "a" else dgc
        list(named_parameters)
        on_every_rank(
            ValueError,  # Horovod's, of its own optimizer
            "were not named",
            lambda o=optimizer, n=named_parameters, c=compression, lib=library: lib.DistributedOptimizer(
                o, n, compression=c
            ),
            way,
        )
        optimizer = library.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
        train(optimizer, model, 1)
        compression.close()
    on_every_rank(
        dgc.ConfigError, "once only", lambda: dgc.Compression.dgc(named_parameters, momentum=0.0), "compressor"
    )


@case
def an_object_in_the_wrong_place_is_named_in_one_line():
    model = make_model()
    optimizer = sgd(model)
    for place, wrong in {
        "positional": lambda: dgc.Compression.dgc(optimizer),
        "compression": lambda: dgc.DistributedOptimizer(optimizer, compression=model),
        "optimizer": lambda: dgc.DistributedOptimizer(model),
        "of a compressor": lambda: dgc.Compression.dgc(model.named_parameters(), optimizer=model),
        "passes": lambda: dgc.DistributedOptimizer(optimizer, model.named_parameters(), None, model),
    }.items():
        error = on_every_rank(dgc.ConfigError, "of class (Net|SGD)", wrong, place)
        assert "\n" not in str(error), error
        assert len(str(error)) < 250, error


@case
def models_that_were_never_broadcast():
    """The mean of gradients of unlike models fits none of them: the first step is the last."""
    for way in "ab":
        model = make_model(seed=1 + hvd.rank())
        before = [p.detach().clone() for p in model.parameters()]
        optimizer, _ = wrap(way, model, sgd(model))
        error = on_every_rank(
            dgc.ConfigError, "do not train the same", lambda o=optimizer, m=model: train(o, m, 1), way
        )
        assert "hvd.broadcast_parameters" in str(error)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "nothing was applied"


@case
def learning_rates_that_differ_from_the_beginning_or_drift_apart():
    for way in "ab":
        for momentum in (0.9, 0.0):
            model = make_model()
            optimizer, _ = wrap(way, model, sgd(model, lr=0.1, momentum=momentum))
            train(optimizer, model, 2)
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + hvd.rank())
            text, label = "disagree in step 2 about the learning rate", f"{way} {momentum}"
            on_every_rank(dgc.ConfigError, text, lambda o=optimizer, m=model: train(o, m, 1), label)
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), (
                "nothing was applied"
            )
        model = make_model()
        optimizer, _ = wrap(way, model, sgd(model, lr=torch.tensor(0.1 + hvd.rank())))
        text = "disagree in step 0 about the learning rate"
        on_every_rank(dgc.ConfigError, text, lambda o=optimizer, m=model: train(o, m, 1), f"{way} tensor")


@case
def elastic_horovod():
    model = make_model()
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        for way in "ab":
            on_every_rank(dgc.ConfigError, "elastic", lambda way=way: wrap(way, model, sgd(model)), way)
        on_every_rank(dgc.ConfigError, "elastic", lambda: dgc.DGCMomentum(model.parameters(), 0.1, 0.9, 0))
        zero = lambda: dgc.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)  # noqa: E731
        on_every_rank(dgc.ConfigError, "elastic", zero)
    finally:
        del os.environ["HOROVOD_ELASTIC"]


if __name__ == "__main__":
    run_cases()

"""Horovod's process sets: some of the ranks exchange."""

import horovod.torch as hvd
import torch
from models import assert_replicas_identical, flat, make_model, raises, sgd, train, wrap
from worker_tools import case

import dgc.torch as dgc


@case("4ranks", way="ab")
def replicas_are_identical_within_the_set_and_others_train_alone(way):
    evens = hvd.add_process_set([0, 2])
    model = make_model()
    options = {"process_set": evens} if way == "a" else {}
    optimizer, compression = wrap(way, model, sgd(model), hvd_options={"process_set": evens}, sparsity=0.9, **options)
    included = hvd.rank() in (0, 2)
    assert (compression.engine is not None) == included
    train(optimizer, model, 5)
    assert bool(optimizer.state) != included, "who exchanges gradients adopts momentum"
    gathered = hvd.allgather(flat(model).unsqueeze(0), name=f"sets {way}")
    assert torch.equal(gathered[0], gathered[2])
    assert not torch.equal(gathered[0], gathered[1])
    hvd.remove_process_set(evens)


@case("4ranks")
def sets_may_overlap():
    """First on some ranks, then on all: the ranks of both have made more compressors than the others."""
    pair = hvd.add_process_set([0, 1])
    models = [make_model(), make_model()]
    made = []
    for chosen, model in zip((pair, hvd.global_process_set), models, strict=True):
        made.append(wrap("b", model, sgd(model), hvd_options={"process_set": chosen}, sparsity=0.9))
    for model, (optimizer, _) in zip(models, made, strict=True):
        train(optimizer, model, 3)
    assert_replicas_identical(models[1])
    for _, compression in made:
        compression.close()

    model = make_model()
    if pair.included():
        dgc.DGCMomentum(model.parameters(), 0.1, 0.9, 0, process_set=pair).compression.close()
    optimizer = dgc.DGCMomentum(model.parameters(), 0.1, 0.9, 0)
    train(optimizer, model, 3)
    assert_replicas_identical(model)
    optimizer.compression.close()
    hvd.remove_process_set(pair)


@case("2ranks")
def the_compressor_alone_may_be_given_a_set():
    alone = hvd.add_process_set([0])
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), process_set=alone)
    assert compression.is_bound
    assert compression.engine is None
    assert optimizer.process_set is alone
    if hvd.rank() == 1:  # it cannot know which ranks wait, and waits for none
        named = {"process_set": hvd.global_process_set}
        wrong = lambda: wrap("b", model, sgd(model), process_set=alone, hvd_options=named)  # noqa: E731
        raises(dgc.ConfigError, "different process sets", wrong)
    hvd.remove_process_set(alone)

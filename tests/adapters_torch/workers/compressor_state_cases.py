"""A compressor's state before and after it is bound to a model, on 2 real ranks."""

import copy
import functools
import pickle

import horovod.torch as hvd
import torch
from models import flat, make_model, on_every_rank, raises, sgd, train, wrap
from worker_tools import case, close_later

import dgc.torch as dgc

COPIES = {
    "given": lambda compression: compression,
    "copy": copy.copy,
    "deepcopy": lambda compression: copy.deepcopy({"settings": compression})["settings"],
    "pickle": lambda compression: pickle.loads(pickle.dumps([compression]))[0],
}


def trained(steps, compression=None):
    """A model after some steps, its optimizer and its compressor."""
    model = make_model()
    compression = close_later(compression or dgc.Compression.dgc(sparsity=0.9))
    optimizer = dgc.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression)
    train(optimizer, model, steps)
    return model, optimizer, compression


@case
def loaded_before_binding_on_one_rank_only_it_is_refused_and_can_be_mended():
    state = trained(2)[2].state_dict()
    compression = dgc.Compression.dgc(sparsity=0.9)
    if hvd.rank() == 1:
        compression.load_state_dict(state)
    on_every_rank(dgc.LayoutError, "on every rank or on none", lambda: trained(1, compression))
    assert not compression.is_bound
    compression.load_state_dict(state)
    trained(1, compression)
    assert compression.describe()["step"] == 3


@case(empty=("of a new compressor", "{}", "of three ranks"))
def an_empty_one_resets(empty):
    model, optimizer, compression = trained(2)
    assert compression.residual_norm > 0
    new = dgc.Compression.dgc().state_dict()
    given = {"{}": {}, "of a new compressor": new, "of three ranks": [new, new, new]}[empty]
    compression.load_state_dict(given, resize=isinstance(given, list))
    assert compression.residual_norm == 0
    assert compression.describe()["step"] == 0
    train(optimizer, model, 1)


@case
def an_empty_one_on_one_rank_alone_is_refused():
    _, _, compression = trained(2)
    mine = compression.state_dict() if hvd.rank() else {}
    on_every_rank(dgc.LayoutError, "states differ", lambda: compression.load_state_dict(mine))


@case
def one_of_another_layout_or_number_of_ranks_is_refused():
    model, optimizer, compression = trained(2)
    state = compression.state_dict()
    on_every_rank(dgc.LayoutError, "resize=True", lambda: compression.load_state_dict({**state, "size": 3}))
    on_every_rank(dgc.LayoutError, "all 2 old ranks", lambda: compression.load_state_dict([state], resize=True))
    other = make_model(width=32)
    _, another = wrap("b", other, sgd(other), sparsity=0.9)
    match = "sparsified when the state was saved|another model"
    on_every_rank(dgc.LayoutError, match, lambda: another.load_state_dict(state))
    train(optimizer, model, 1)


@case(how=COPIES)
def a_compressor_can_be_copied_until_it_is_bound(how):
    """As it is by a script that copies its settings, or hands them to a process that it spawns."""
    given = dgc.Compression.dgc(sparsity=0.9, exclude=["bias"])
    model, _, compression = trained(2, COPIES[how](given))
    assert torch.equal(flat(model), flat(trained(2, dgc.Compression.dgc(sparsity=0.9, exclude=["bias"]))[0]))
    if how != "given":
        match = r"load_state_dict\(compression.state_dict"
        raises(TypeError, match, functools.partial(COPIES[how], compression))

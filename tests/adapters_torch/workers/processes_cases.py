"""What else lives beside the exchange, on 2 real ranks: worker processes, threads, copies of the model."""

import copy
import gc
import itertools
import os
import threading
import time
from unittest.mock import patch

import torch
from horovod.torch import mpi_ops
from models import EXACT, dense_reference, loss_of, make_model, sgd, train, worst_difference, wrap
from torch import nn
from worker_tools import OPENED, case

from dgc.torch import horovod


class Batches(torch.utils.data.Dataset):
    """The batches of one rank, made in a worker process."""

    def __len__(self):
        return 6

    def __getitem__(self, step):
        generator = torch.Generator().manual_seed(1000 * step + int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
        return torch.randn(8, 20, generator=generator), torch.randint(0, 10, (8,), generator=generator)


@case("mpirun", way="ab")
def forked_workers_of_a_data_loader_come_and_go(way):
    model = make_model()
    expected = dense_reference(model, 6, momentum=0.9)
    optimizer, _ = wrap(way, model, sgd(model), **EXACT)
    done = 0
    for _ in range(2):  # epochs: workers are forked while the communication thread lives, and end
        loader = torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=1, multiprocessing_context="fork")
        for step, (x, y) in enumerate(loader):
            if step // 3 != done // 3:
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            done += 1
    assert done == 6
    assert worst_difference(model, expected) <= 1e-5


@case("mpirun")
def optimizers_that_nobody_closes_end_their_threads():
    before = set(threading.enumerate())
    for way, seed in itertools.product("ab", range(3)):
        model = make_model(seed)
        expected = dense_reference(model, 2, momentum=0.9)
        optimizer, _ = wrap(way, model, sgd(model), **EXACT)
        train(optimizer, model, 2)
        assert worst_difference(model, expected) <= 1e-5, (way, seed)
    OPENED.clear()
    del optimizer, model, _
    gc.collect()
    deadline = time.monotonic() + 300
    while len(left := set(threading.enumerate()) - before) > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert len(left) <= 2, left


@case("mpirun", way="ab")
def averaged_and_copied_models_do_not_touch_the_trained_one(way):
    model = make_model()
    expected = dense_reference(model, 6, momentum=0.9)
    optimizer, _ = wrap(way, model, sgd(model), **EXACT)
    ema = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, p, n: 0.5 * a + 0.5 * p)
    copies = []

    def after(step):
        ema.update_parameters(model)
        copies.append(copy.deepcopy(model))

    train(optimizer, model, 6, after=after)
    assert worst_difference(model, expected) <= 1e-5
    assert worst_difference(copies[-1], model) == 0
    assert worst_difference(copies[0], model) > 0
    again = copy.deepcopy(copies[2])
    loss_of(again, 9).backward()  # a copy's gradients are nobody's business
    train(optimizer, model, 1, start=6)


@case("mpirun")
def what_horovod_holds_of_ours_has_another_reference():
    """Its thread must never be the last one but Python's to let go of a tensor: for that it would need the GIL."""
    held, given, hold = [], [], horovod.hold

    def noting(tensor):
        holder = hold(tensor)
        assert tensor._use_count() >= 2
        held.append(tensor)
        return holder

    class Noting(dict):
        def __setitem__(self, handle, tensors):
            given.extend(tensors)
            super().__setitem__(handle, tensors)

    with patch.object(horovod, "hold", noting), patch.object(mpi_ops, "_handle_map", Noting(mpi_ops._handle_map)):
        for way, chosen in itertools.product("ab", ("auto", "horovod")):
            model = make_model()
            optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9, transport=chosen)
            train(optimizer, model, 3)
    assert len(given) > 40, len(given)
    assert all(any(tensor is known for known in held) for tensor in given)

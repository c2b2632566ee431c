"""On real ranks: a run that was saved and loaded continues as if nothing had happened."""

import functools
import itertools
import shutil

import horovod.torch as hvd
import torch
from adapters_torch.workers.models import (
    assert_replicas_identical,
    flat,
    loss_of,
    make_model,
    raises,
    shared_folder,
    train,
    wrap,
)
from checkpoint_tools import sgd
from worker_tools import case

import dgc.torch as dgc

OPTIONS = dict(sparsity=[0.75, 0.99], rampup_step=8, rampup_begin_step=3, values="float16")


@case
def a_resumed_run_continues_bit_for_bit():
    for way, cut in itertools.product("ab", (2, 6, 13)):
        straight = make_model()
        optimizer, compression = wrap(way, straight, sgd(straight), **OPTIONS)
        train(optimizer, straight, 16)
        compression.close()

        first = make_model()
        optimizer, compression = wrap(way, first, sgd(first), **OPTIONS)
        train(optimizer, first, cut)
        folder = shared_folder(f"{way}{cut}")
        dgc.save_checkpoint(folder, model=first, optimizer=optimizer, compression=compression, extra={"epoch": 7})
        compression.close()

        resumed = make_model(seed=9)
        optimizer, compression = wrap(way, resumed, sgd(resumed), **OPTIONS)
        extra = dgc.load_checkpoint(folder, model=resumed, optimizer=optimizer, compression=compression)
        assert extra == {"epoch": 7}
        train(optimizer, resumed, 16 - cut, start=cut)
        assert torch.equal(flat(resumed), flat(straight)), f"{way} saved after {cut} steps"
        assert_replicas_identical(resumed, f"resume {way}{cut}")
        compression.close()
        hvd.barrier()
        if hvd.rank() == 0:
            shutil.rmtree(folder)


@case
def the_checkpoint_is_also_a_dense_one():
    model = make_model()
    optimizer, compression = wrap("b", model, sgd(model), **OPTIONS)
    train(optimizer, model, 4)
    folder = shared_folder("dense")
    dgc.save_checkpoint(folder, model=model, optimizer=optimizer, compression=compression)
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    group = saved["optimizer"]["param_groups"][0]
    assert (group["momentum"], group["nesterov"], group["weight_decay"]) == (0.9, True, 0.001)
    assert optimizer.state_dict()["param_groups"][0] == group
    plain = make_model(seed=3)
    plain_optimizer = sgd(plain)
    plain.load_state_dict(saved["model"])
    plain_optimizer.load_state_dict(saved["optimizer"])
    assert torch.equal(flat(plain), flat(model))


@case
def saving_and_loading_in_the_middle_of_a_step_is_refused():
    """Before they use the transport, which belongs to the exchange then; the step goes on as if nothing was called."""
    for way in "ab":
        straight, model = make_model(), make_model()
        optimizer, compression = wrap(way, straight, sgd(straight), **OPTIONS)
        train(optimizer, straight, 6)
        compression.close()
        optimizer, compression = wrap(way, model, sgd(model), **OPTIONS)
        objects = dict(model=model, optimizer=optimizer, compression=compression)
        folder = shared_folder(f"middle {way}")
        train(optimizer, model, 3)
        dgc.save_checkpoint(folder, **objects)
        optimizer.zero_grad()
        loss_of(model, 3).backward()
        for call in (dgc.save_checkpoint, dgc.load_checkpoint):
            name = rf"^{call.__name__}\(\) was called while a step is under way"
            raises(dgc.LayoutError, name, functools.partial(call, folder, **objects))
        optimizer.step()
        train(optimizer, model, 2, start=4)
        assert torch.equal(flat(model), flat(straight)), way
        compression.close()
        hvd.barrier()
        if hvd.rank() == 0:
            shutil.rmtree(folder)


@case
def after_an_error_or_an_exception_training_goes_on_from_a_reset_or_a_loaded_state():
    """With Horovod's own optimizer the next step is an error if an exchange had begun; with a new model it goes on."""

    def rates_differ(optimizer, model):
        optimizer.param_groups[0]["lr"] /= 1 + hvd.rank()
        raises(dgc.ConfigError, "learning rate", lambda: train(optimizer, model, 1, start=2))
        optimizer.param_groups[0]["lr"] = 0.05

    def interrupted(optimizer, model, layer="first"):
        optimizer.zero_grad()
        hook = getattr(model, layer).weight.register_hook(lambda g: 1 / 0)
        raises(ZeroDivisionError, "", lambda: loss_of(model, 2).backward())
        hook.remove()

    def interrupted_elsewhere(optimizer, model):
        interrupted(optimizer, model, ("first", "left")[hvd.rank() % 2])

    failures = (rates_differ, interrupted, interrupted_elsewhere)
    ways = [*itertools.product("b", [None], failures, ("reset", "state", "file"))]
    ways += [*itertools.product("a", [None], failures[:2], ("reset", "state", "file"))]
    ways += [(way, {"backward_passes_per_step": 2}, interrupted, "state") for way in "ab"]
    ways += [("a", {"groups": 2}, interrupted, "state")]
    for way, hvd_options, failure, recovery in ways:
        label = f"{way} {hvd_options} {failure.__name__} {recovery}"
        model = make_model()
        optimizer, compression = wrap(way, model, sgd(model), hvd_options=hvd_options, **OPTIONS)
        objects = dict(model=model, optimizer=optimizer, compression=compression)
        train(optimizer, model, 2)
        state, folder = compression.state_dict(), shared_folder(label)
        dgc.save_checkpoint(folder, **objects)
        failure(optimizer, model)
        if recovery == "state":
            foreign = {**state, "rank": -1} if hvd.rank() else state
            raises(dgc.LayoutError, "rank", functools.partial(compression.load_state_dict, foreign))
            compression.load_state_dict(state)
        else:
            compression.reset()
        if recovery == "file":
            dgc.load_checkpoint(folder, **objects)
        if way == "a" and "backward_passes_per_step" not in (hvd_options or {}):
            raises(dgc.ConfigError, "build model, optimizer", functools.partial(train, optimizer, model, 4, start=2))
            compression.close()
            model = make_model()
            optimizer, compression = wrap(way, model, sgd(model), hvd_options=hvd_options, **OPTIONS)
            recovery = "file"
            dgc.load_checkpoint(folder, model=model, optimizer=optimizer, compression=compression)
        train(optimizer, model, 4, start=2)
        if recovery != "reset":
            straight = make_model()
            own, other = wrap(way, straight, sgd(straight), hvd_options=hvd_options, **OPTIONS)
            train(own, straight, 6)
            other.close()
            assert torch.equal(flat(model), flat(straight)), label
        assert_replicas_identical(model, label)
        compression.close()
        hvd.barrier()
        if hvd.rank() == 0:
            shutil.rmtree(folder)

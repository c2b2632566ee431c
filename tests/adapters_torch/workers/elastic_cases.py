"""What dgc.torch.elastic.TorchState takes along from one group of ranks to the next, on ranks that all stay."""

import warnings

import horovod.torch as hvd
import torch
from adapters_torch.workers.models import flat, make_model, train
from adapters_torch.workers.tensors import assert_replicas_identical, unpickling_is_an_error
from worker_tools import case

import dgc.torch as dgc
from dgc.torch.elastic import TorchState


@case
def residuals_come_from_the_latest_commit_alone():
    """One process commits none: those that two have committed before belong to another moment."""
    both, alone = hvd.global_process_set, [hvd.add_process_set([r]) for r in range(hvd.size())][hvd.rank()]
    model, wrapping = make_model(), {"process_set": both}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    state = TorchState(model, optimizer, dgc.Compression.dgc(sparsity=0.9), wrapping=wrapping)
    groups = ((both, False, 0), (both, False, 2), (both, True, 2), (alone, False, 0), (both, False, 2))
    for members, found, steps in groups:
        wrapping["process_set"] = members
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "one process compresses nothing")
            state.begin()
        assert (state.compression.residual_norm > 0) == found, members
        train(optimizer, model, steps)
        state.save()
        state.end()


def committed(steps=2):
    """A state that has trained, and the residuals and momentum that this rank has committed."""
    model = make_model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    state = TorchState(model, optimizer, dgc.Compression.dgc(sparsity=0.9))
    state.begin()
    train(optimizer, model, steps)
    state.save()
    state.end()
    return state, residuals(state._committed)


def residuals(saved):
    return torch.cat([entry[key] for entry in saved["parameters"].values() if "v" in entry for key in "vu"])


def begun_with(state, found):
    """The next group of ranks begins, and all of them have these residuals and momentum."""
    with unpickling_is_an_error(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state.begin()
    torch.testing.assert_close(residuals(state.compression.state_dict()), found, rtol=1e-6, atol=0)
    state.end()
    return [str(w.message) for w in caught if "had not sent" in str(w.message)]


@case
def ranks_that_stay_go_on_with_the_mean_whatever_their_numbers():
    state, own = committed()
    state._committed = hvd.allgather_object(state._committed)[(hvd.rank() + 1) % hvd.size()]
    owns = hvd.allgather_object(own)
    assert not torch.equal(*owns)
    assert not begun_with(state, sum(owns) / len(owns))


@case
def a_rank_that_left_counts_as_one_without_residuals():
    state, own = committed()
    if hvd.rank() == 1:
        state._committed = None
    said = begun_with(state, hvd.allgather_object(own)[0] / hvd.size())
    assert len(said) == (hvd.rank() == 0), said
    assert all(text.startswith(f"1 of {hvd.size()} ranks left, and with them what") for text in said), said


DECAYS = {
    "SGD": {"weight_decay": 0.01},
    "ASGD": {"weight_decay": 0.01, "lambd": 0.5},
    "Rprop": {},
}


@case(name=DECAYS)
def ranks_take_the_options_and_parameters_of_rank_0(name):
    model = make_model(seed=hvd.rank())
    parameters = [p for p in model.parameters() if p.requires_grad]
    own = {key: value * (1 + hvd.rank()) for key, value in {"lr": 0.1, **DECAYS[name]}.items()}
    optimizer = getattr(torch.optim, name)(parameters, **own)
    state = TorchState(model, optimizer, dgc.Compression.dgc())
    state.sync()
    (group,) = optimizer.param_groups
    assert {key: group[key] for key in own} == {"lr": 0.1, **DECAYS[name]}
    assert ("weight_decay" in group) == bool(DECAYS[name])
    assert torch.equal(flat(model), flat(make_model()))


@case
def another_group_of_ranks_finds_no_hooks_of_the_last_one():
    state, _ = committed()
    found = []
    for _ in range(3):
        state.begin()
        train(state.optimizer, state.model, 2)
        found.append(sum(len(value) for name, value in vars(state.optimizer).items() if name.endswith("_hooks")))
        state.end()
    assert found == [found[0]] * 3, found


@case
def with_step_ahead_what_was_committed_is_the_same_on_all_ranks():
    """So a rank that came without a state goes on like the others, after a restore, too."""
    model = make_model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    state = TorchState(model, optimizer, dgc.Compression.dgc(steps=100))
    before = flat(model).clone()
    for restored in (False, False, True):
        if restored:
            state.begin()
            train(optimizer, model, 2)
            state.end()
            state.restore()
            assert torch.equal(flat(model), before)
            state._committed = None if hvd.rank() == 1 else state._committed
        state.begin()
        assert state.compression.config.steps_ahead
        train(optimizer, model, 3)
        state.save()
        before = flat(model).clone()
        assert_replicas_identical([flat(model), *(s["exp_avg"].flatten() for s in optimizer.state.values())])
        state.end()

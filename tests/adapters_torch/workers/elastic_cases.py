"""What dgc.torch.elastic.TorchState takes along from one group of ranks to the next, on ranks that all stay."""

from __future__ import annotations

import warnings

import horovod.torch as hvd
import torch
from adapters_torch.workers.models import flat, make_model, train
from worker_tools import case, run_cases

import dgc.torch as dgc
from dgc.torch.elastic import TorchState


@case
def residuals_come_from_the_latest_commit_alone():
    """One process commits none: those that two have committed before belong to another moment."""
    both, alone = hvd.global_process_set, [hvd.add_process_set([r]) for r in range(hvd.size())][hvd.rank()]
    model, wrapping = make_model(), {"process_set": both}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    state = TorchState(model, optimizer, dgc.Compression.dgc(sparsity=0.9), wrapping=wrapping)
    for members, found in ((both, False), (both, True), (alone, False), (both, False)):
        wrapping["process_set"] = members
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "one process compresses nothing")
            state.begin()
        assert (state.compression.residual_norm > 0) == found, members
        train(optimizer, model, 0 if members is alone else 2)
        state.save()
        state.end()


@case
def ranks_take_the_options_of_rank_0():
    for cls, decays in ((torch.optim.SGD, {"weight_decay": 0.01 * (1 + hvd.rank())}), (torch.optim.Rprop, {})):
        model = make_model(seed=hvd.rank())
        optimizer = cls([p for p in model.parameters() if p.requires_grad], lr=0.1 * (1 + hvd.rank()), **decays)
        state = TorchState(model, optimizer, dgc.Compression.dgc())
        state.sync()
        (group,) = optimizer.param_groups
        assert (group["lr"], group.get("weight_decay", "none")) == (0.1, 0.01 if decays else "none")
        assert torch.equal(flat(model), flat(make_model()))


if __name__ == "__main__":
    run_cases()

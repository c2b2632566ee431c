"""dgc.torch.join beside hvd.join, with uneven numbers of batches."""

import horovod.torch as hvd
import torch
from adapters_torch.workers.models import assert_replicas_identical, make_model, train, worst_difference, wrap
from worker_tools import case
from worker_tools import uneven_batches as batches

import dgc.torch as dgc

FRESH = "Horovod's thread has crashed in hvd.join() on ranks that had served 170 other cases"
EXACT = {"sparsity": 0.0, "values": "float32", "small": "float32"}
SGD = {"plain": {}, "nesterov decay": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}}


@case(gap=(1, 5), sgd=SGD, way="ab")
def uneven_data_equal_horovods_join_at_sparsity_0(gap, sgd, way):
    plain, model = make_model(), make_model()
    dense = torch.optim.SGD(plain.parameters(), lr=0.1, **SGD[sgd])
    train(hvd.DistributedOptimizer(dense, plain.named_parameters()), plain, batches(gap))
    last = hvd.join()
    hvd.broadcast_parameters(plain.state_dict(), root_rank=last)
    optimizer, compression = wrap(way, model, torch.optim.SGD(model.parameters(), lr=0.1, **SGD[sgd]), **EXACT)
    train(optimizer, model, batches(gap))
    assert dgc.join(compression) == last
    assert_replicas_identical(model)
    assert worst_difference(model, plain) <= 1e-5
    train(optimizer, model, 3, start=99)
    assert_replicas_identical(model)

"""Which errors ``hvd.elastic.run`` may take for a lost rank, on 2 real ranks."""

from unittest.mock import Mock

import horovod.torch as hvd
import torch
from adapters_torch.workers.models import make_model, on_every_rank, train
from adapters_torch.workers.tensors import raises
from horovod.common.exceptions import HorovodInternalError
from worker_tools import case

import dgc.torch as dgc
from dgc.torch import elastic

FRESH = "shuts Horovod down"


def make_state(**options):
    model = make_model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    return elastic.TorchState(model, optimizer, dgc.Compression.dgc(**options))


@case
def an_error_that_would_come_again_ends_the_job():
    begun = []

    @elastic.run
    def run(state):
        begun.append(state)
        assert len(begun) == 1, "it begins again"
        bucket = state.compression.engine.exchange._buckets[0]
        bucket._select = Mock(side_effect=MemoryError("no room"))
        train(state.optimizer, state.model, 1)

    state = make_state()
    on_every_rank(dgc.RemoteError, "no room", lambda: run(state))


@case
def a_rank_that_is_lost_during_sync_is_horovods_error():
    state, rank = make_state(), hvd.rank()
    if rank == hvd.size() - 1:
        hvd.shutdown()
    else:
        raises(HorovodInternalError, "", state.sync)

"""What every transport promises, by torch.distributed's collectives."""

import torch
import torch.distributed as dist
from adapters_torch.torchrun_tools import gathered
from transport_contract import Carrier

from dgc.core.collectives import SMALL_BYTES
from dgc.torch.distributed import DistributedTransport
from dgc.transport.framework import GATHER_BYTES

SIZE = dist.get_world_size()
LENGTHS = [1, 7, 1000, SMALL_BYTES // 4 // SIZE + 1, 100_003, 2 * GATHER_BYTES // 4 // SIZE + 1]


def users_sum(number):
    return torch.tensor(gathered(number)).sum().item()


Carrier(DistributedTransport, "torch.distributed", LENGTHS, {1, 7, 1000}, users_sum).keep_promises()

"""Train on scikit-learn's scanned digits: FSDP2 shards the model inside a node, gradients are compressed between nodes.

torchrun --standalone --nproc-per-node 4 examples/fsdp_digits.py      # stands for two nodes of two ranks
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dgc.torch as dgc


def main() -> None:
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train = torch.utils.data.Subset(data, range(898))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler, drop_last=True)

    torch.manual_seed(0)  # the same model on every rank
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9, weight_decay=1e-4)
    compression = dgc.Compression.dgc(sparsity=[0.75, 0.9375, 0.984375, 0.996], rampup_step=4 * len(loader))
    optimizer = dgc.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=compression, group=mesh["replicate"].get_group()
    )

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    x, y = data[898:]
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    if dist.get_rank() == 0:
        print(f"accuracy {100 * accuracy:.2f} %, {compression.stats.last.ratio:.0f} times fewer bytes between nodes")
    compression.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

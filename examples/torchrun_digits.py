"""Train a small CNN on scikit-learn's scanned digits under torchrun, with neither Horovod nor MPI.

torchrun --standalone --nproc-per-node 2 examples/torchrun_digits.py [EPOCHS]

Twenty epochs are 560 steps, a short run for 99.9 %: docs/options.md says what to expect.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dgc.torch as dgc

TRAIN_IMAGES = 898


def main() -> None:
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    train = torch.utils.data.Subset(data, range(TRAIN_IMAGES))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler, drop_last=True)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip
    dgc.broadcast_parameters(model.state_dict())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9, weight_decay=1e-4)
    compression = dgc.Compression.dgc(sparsity=[0.75, 0.9375, 0.984375, 0.996, 0.999], rampup_step=2 * len(loader))
    optimizer = dgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    x, y = data[TRAIN_IMAGES:]
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    if dist.get_rank() == 0:
        print(f"accuracy {100 * accuracy:.2f} %, {compression.stats.last.ratio:.0f} times fewer bytes in the last step")
    compression.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

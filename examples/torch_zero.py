"""Train on scikit-learn's scanned digits with the optimizer's state sharded over the ranks.

    torchrun --nproc-per-node 2 examples/torch_zero.py                    # Adam: half of its state on each rank
    horovodrun -np 2 python examples/torch_zero.py                        # the same over Horovod
    torchrun --nproc-per-node 2 examples/torch_zero.py --compression dgc  # SGD with momentum, 0.1 % of each gradient

This is what changes in an ordinary script of DistributedDataParallel or Horovod:

    -optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    +optimizer = dgc.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)

After training, rank 0 collects the whole state and shows that an ordinary Adam continues from it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import dgc.torch as dgc

TRAIN_IMAGES = 898
TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ

if not TORCHRUN:
    import horovod.torch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and rank")
    parser.add_argument("--hidden", type=int, default=512, help="width of the hidden layers")
    parser.add_argument("--compression", choices=("none", "dgc"), default="none", help="what gradients travel as")
    parser.add_argument("--sparsity", type=float, default=0.999, help="share of each gradient that is held back")
    parser.add_argument("--bucket-view", action="store_true", help="keep each rank's parameters in one flat buffer")
    parser.add_argument("--json", metavar="FILE", help="write the results to this file")
    return parser.parse_args()


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    return torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)


def distributed(args: argparse.Namespace, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and optimizer to train with: Adam with dense gradients; SGD with momentum with compressed ones."""
    names = list(model.named_parameters())
    kinds = {"none": (torch.optim.Adam, {"lr": 1e-3}), "dgc": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})}
    cls, options = kinds[args.compression]
    # No broadcast of its state: every rank has one of its own.
    optimizer = dgc.ZeroRedundancyOptimizer(
        model.parameters(), cls, parameters_as_bucket_view=args.bucket_view, **options
    )
    if args.compression == "dgc":
        compression = dgc.Compression.dgc(sparsity=[0.75, 0.9375, 0.984375, args.sparsity], rampup_step=100)
        return model, dgc.DistributedOptimizer(optimizer, named_parameters=names, compression=compression)
    if TORCHRUN:
        return nn.parallel.DistributedDataParallel(model), optimizer
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=names)


def gathered(value: object) -> list[object]:
    if not TORCHRUN:
        return hvd.allgather_object(value, name="value")
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t))


def continues_unsharded(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether an ordinary optimizer takes over the collected state, which rank 0 has."""
    whole = optimizer.state_dict()
    plain = optimizer.optimizer_class(model.parameters(), lr=1.0)
    plain.load_state_dict(whole)
    return len(plain.state) == len(whole["state"]) and plain.param_groups[0]["lr"] == whole["param_groups"][0]["lr"]


def main() -> None:
    args = parse_arguments()
    if TORCHRUN:
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    images, labels = load_images()
    layers: list[nn.Module] = [nn.Linear(64, args.hidden)]
    for width in (args.hidden, args.hidden, 10):
        layers += [nn.ReLU(), nn.Linear(args.hidden, width)]
    model = nn.Sequential(*layers)
    if not TORCHRUN:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    network, optimizer = distributed(args, model)

    batch = args.batch_size * size
    steps = args.epochs * (TRAIN_IMAGES // batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(args.epochs):
        order = torch.randperm(TRAIN_IMAGES, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, TRAIN_IMAGES - batch + 1, batch):
            own = order[start + rank : start + batch : size]
            optimizer.zero_grad()
            F.cross_entropy(network(images[own]), labels[own]).backward()
            optimizer.step()
            scheduler.step()

    with torch.no_grad():
        correct = model(images[TRAIN_IMAGES:]).argmax(1) == labels[TRAIN_IMAGES:]
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    optimizer.consolidate_state_dict(to=0)
    results = {
        "ranks": size,
        "compression": args.compression,
        "accuracy": correct.double().mean().item(),
        "replicas_identical": len(set(gathered(digest))) == 1,
        "state_bytes_per_rank": gathered(state_bytes(optimizer.optim)),
    }
    if rank == 0:
        results["continues_unsharded"] = continues_unsharded(optimizer, model)
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=2)
        print(
            f"{args.compression} on {size} ranks: test accuracy {results['accuracy']:.2%}; optimizer state per rank "
            f"{results['state_bytes_per_rank']} bytes"
        )
    if TORCHRUN:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

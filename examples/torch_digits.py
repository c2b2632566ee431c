"""Train a small CNN on scikit-learn's scanned digits with Horovod, dense or with Deep Gradient Compression.

    horovodrun -np 2 python examples/torch_digits.py                       # DGC: sends 0.1 % of each gradient
    horovodrun -np 2 python examples/torch_digits.py --compression none    # plain Horovod
    horovodrun -np 2 python examples/torch_digits.py --compression qsgd --option bits=8    # or another compressor

It is an ordinary Horovod script. This is all that turns DGC on (the optimizer's own line stays as it is):

     import horovod.torch as hvd
    +import dgc.torch as dgc
     ...
     optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9, weight_decay=1e-4)
    +compression = dgc.Compression.dgc(model.named_parameters(), optimizer=optimizer, sparsity=0.999)
    -optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    +optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)

The same file runs under ``horovodrun``, ``horovodrun --gloo``, ``mpirun`` and plain ``python``. One process sends no
gradients and trains with plain SGD.

The data are 1797 real scans of handwritten digits, 8x8 pixels. The first half trains the network and the second half
tests it. They are not shuffled before: neighbours tend to be from the same hand, so this is the harder test.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import sys
import time
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import dgc.torch as dgc
from dgc.core.compressors import compressor_names

TRAIN_IMAGES = 898
PAPER_WARMUP = [0.75, 0.9375, 0.984375, 0.996, 0.999]


class Net(nn.Module):
    """Two convolutions and two linear layers; 99.8 % of its 284 000 parameters are in three large tensors."""

    def __init__(self) -> None:
        """Build the layers."""
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * 4 * 4, 256)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits, (N, 10), of images (N, 1, 8, 8)."""
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Digits with Horovod and Deep Gradient Compression",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=40, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank; multiplied by their number")
    parser.add_argument("--momentum", type=float, default=0.9, help="SGD momentum")
    parser.add_argument("--weight-decay", type=float, default=1e-4, help="SGD weight decay")
    parser.add_argument("--nesterov", action="store_true", help="Nesterov momentum")
    parser.add_argument("--warmup-epochs", type=float, default=2, help="the learning rate rises over these epochs")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the initial weights, the shuffling and the augmentation"
    )
    parser.add_argument(
        "--compression", choices=("none", "fp16", *compressor_names()), default="dgc", help="how gradients travel"
    )
    parser.add_argument(
        "--option", type=option, action="append", default=[], metavar="NAME=VALUE", help="an option of the compressor"
    )
    parser.add_argument("--way", choices=("a", "b"), default="a", help="a: Horovod's own wrapper, b: dgc's")
    parser.add_argument(
        "--sparsity", type=float, nargs="+", help="share of entries held back; dgc: the paper's warm-up to 0.999"
    )
    parser.add_argument("--by-steps", action="store_true", help="dgc: let the number of steps choose what is sent")
    parser.add_argument("--rampup-begin-step", type=int, default=0, help="first compressed step")
    parser.add_argument("--rampup-step", type=int, default=0, help="steps of ramp-up; 0: an eighth of all steps")
    parser.add_argument("--drop-residual", action="store_true", help="control experiment: forget what was not sent")
    parser.add_argument("--progress", action="store_true", help="show a progress bar even if this is no terminal")
    parser.add_argument("--json", metavar="OUT", help="write the results to this file")
    return parser.parse_args()


def option(text: str) -> tuple[str, Any]:
    """``name=value``, the value as Python writes it, or a word."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """The training and the test images, (N, 1, 8, 8) float32 in [0, 1], with their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    return (
        TensorDataset(images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES]),
        TensorDataset(images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:]),
    )


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Turn each image by up to 15 degrees, scale it by up to 10 %, and shift it by up to one pixel."""
    angle, scale, dx, dy = torch.rand(4, len(images), generator=generator) * 2 - 1
    angle, scale = angle * math.radians(15), 1 + 0.1 * scale
    cos, sin = scale * torch.cos(angle), scale * torch.sin(angle)
    theta = torch.stack([torch.stack([cos, -sin, dx / 4], 1), torch.stack([sin, cos, dy / 4], 1)], 1)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def make_compression(
    args: argparse.Namespace, steps: int, rampup_step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Any:
    """What ``DistributedOptimizer(compression=...)`` takes."""
    if args.compression in ("none", "fp16"):
        return getattr(hvd.Compression, args.compression)
    options: dict[str, Any] = {"rampup_begin_step": args.rampup_begin_step}
    if args.by_steps:
        options["steps"] = steps
    elif args.compression == "dgc" or args.sparsity:
        options.update(sparsity=args.sparsity or PAPER_WARMUP, rampup_step=rampup_step)
    if args.drop_residual:
        options["error_feedback"] = False
    options.update(args.option)
    make = getattr(dgc.Compression, args.compression)
    if args.way == "b":
        return make(**options)
    return make(model.named_parameters(), optimizer=optimizer, **options)


def evaluate(model: nn.Module, test: TensorDataset) -> tuple[float, float]:
    """Accuracy and loss over all test images, each rank looking at its share of them."""
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in test.tensors)
    model.eval()
    with torch.no_grad():
        logits = model(images)
    correct = (logits.argmax(1) == labels).sum()
    sums = torch.stack([correct.double(), F.cross_entropy(logits, labels, reduction="sum").double()])
    correct, loss = hvd.allreduce(sums, op=hvd.Sum, name="evaluate").tolist()
    return correct / len(test), loss / len(test)


def traffic(compression: object, args: argparse.Namespace, model: nn.Module, steps: int) -> dict[str, int]:
    """Bytes that this rank handed to collectives for its gradients, in the last step and in all steps."""
    trained = [p for p in model.parameters() if p.requires_grad]
    parameters = sum(p.numel() for p in trained)
    dense = sum(p.numel() * p.element_size() for p in trained)
    compressed = 0
    if hvd.size() == 1:
        last = total = dense = 0
    elif isinstance(compression, dgc.DGCCompressor):
        # Beside our messages, Horovod's own wrapper reduces one float32 in the place of each gradient.
        last = compression.stats.last.bytes_sent
        total = compression.stats.total.bytes_sent
        compressed = compression.stats.last.sparse_elements
    else:
        last = dense // 2 if args.compression == "fp16" else dense
        total = last * steps
    return {
        "parameters": parameters,
        "parameters_sparsified": compressed,
        "dense_bytes_per_step": dense,
        "bytes_last_step": last,
        "bytes_total": total,
    }


def main() -> None:
    """Train, and report accuracy and bytes."""
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    augmentation = torch.Generator().manual_seed(args.seed * 1000 + hvd.rank())

    train, test = load_images()
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = Net()
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr * hvd.size(),
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        nesterov=args.nesterov,
    )
    steps = args.epochs * len(loader)
    rampup_step = 0 if args.by_steps else args.rampup_step or max(1, steps // 8)
    compression = make_compression(args, steps, rampup_step, model, optimizer)
    distributed_optimizer = dgc.DistributedOptimizer if args.way == "b" else hvd.DistributedOptimizer
    optimizer = distributed_optimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def learning_rate(step: int) -> float:
        """Share of the full rate: Horovod's linear warm-up from 1 / size, then a cosine down to 0."""
        warmup = args.warmup_epochs * len(loader)
        if step < warmup:
            return (1 + (hvd.size() - 1) * step / warmup) / hvd.size()
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    show = hvd.rank() == 0 and (args.progress or sys.stderr.isatty())
    accuracies = []
    began = time.perf_counter()
    with tqdm(total=steps, disable=not show, unit="step") as progress:
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            model.train()
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(augment(images, augmentation)), labels)
                loss.backward()
                optimizer.step()
                scheduler.step()
                progress.update()
            accuracy, test_loss = evaluate(model, test)
            accuracies.append(accuracy)
            progress.set_description(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}")
    seconds = time.perf_counter() - began

    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    replicas = hvd.allgather_object(digest, name="digests")
    results = {
        "ranks": hvd.size(),
        "compression": args.compression,
        "accuracy": accuracy,
        "accuracies": accuracies,
        "loss": test_loss,
        "seconds": seconds,
        "steps": steps,
        "replicas_identical": len(set(replicas)) == 1,
        "digest": digest,
        "rampup_ends": args.rampup_begin_step + rampup_step,
        **traffic(compression, args, model, steps),
    }
    if hvd.rank() == 0:
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=2)
        print(
            f"{args.compression} on {hvd.size()} ranks: accuracy {accuracy:.2%}, {steps} steps in {seconds:.1f} s, "
            f"bytes sent: {results['bytes_last_step']:,} in the last step, {results['bytes_total']:,} in all"
        )


if __name__ == "__main__":
    main()

"""Train small models on many ranks of one process, gathered and with owners: the loss after equal steps.

    taskset -c 0 python benchmarks/many_ranks_accuracy.py gpt 16 dense gather owners 4:int8 --seeds 0 1 --json FILE

Each word after the number of ranks is one training: ``dense``; ``gather``; ``owners``, with the
budget of the package; or ``N:codec``: owners send N sums, in this codec, for each entry of one rank. ``batch`` among
the words: each rank has as many samples as 4 ranks have, instead of its part of one global batch. Every rank has the
core's own exchange, over :mod:`dgc.transport.local`; their gradients are computed together. On one core (``taskset``)
the ranks' threads take turns. On several they compete for Python's lock, and a step takes five times as long.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.func import functional_call, grad, vmap  # noqa: E402
from torch.nn import functional  # noqa: E402

from dgc.core.compressors import make_config  # noqa: E402
from dgc.core.config import running_mean  # noqa: E402
from dgc.core.exchange import choice, owners  # noqa: E402
from dgc.core.exchange.exchange import Exchange  # noqa: E402
from dgc.core.exchange.step import Hyper, StepOptions  # noqa: E402
from dgc.core.kernels.cpu import NumbaKernels  # noqa: E402
from dgc.core.layout import Parameter, make_layout  # noqa: E402
from dgc.transport.local import local_world  # noqa: E402

BETA1, BETA2, EPS = 0.9, 0.99, 1e-8


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = 4
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (w // self.heads) ** 0.5
        mask = torch.ones(t, t, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """Two blocks over characters."""

    def __init__(self, width: int = 64, length: int = 32) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(96, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.token(x) + self.place.weight[: x.shape[1]]))


class LSTM(nn.Module):
    """One layer over characters, step by step."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.token, self.width = nn.Embedding(96, width), width
        self.into, self.again = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.head = nn.Linear(width, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.into(self.token(x))
        h = c = torch.zeros_like(given[:, 0, : self.width])
        out = []
        for t in range(x.shape[1]):
            i, f, o, g = (given[:, t] + self.again(h)).chunk(4, -1)
            c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            out.append(h)
        return self.head(torch.stack(out, 1))


class CNN(nn.Module):
    """Three convolutions over 8 x 8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.c, self.head = nn.Conv2d(64, 64, 3, padding=1), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.b(functional.relu(self.a(x)))), 2)
        return self.head(functional.max_pool2d(functional.relu(self.c(x)), 2).flatten(1))


def texts():
    text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    codes = torch.tensor([min(max(ord(c) - 32, 0), 95) for c in text])
    split = len(codes) * 9 // 10
    return codes[:split], codes[split:]


def sequences(codes: torch.Tensor, count: int, generator: torch.Generator, length: int):
    starts = torch.randint(len(codes) - length - 1, (count, 1), generator=generator)
    window = codes[starts + torch.arange(length + 1)]
    return window[:, :-1], window[:, 1:]


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = torch.tensor(data.images[order] / 8 - 1, dtype=torch.float32)[:, None]
    y = torch.tensor(data.target[order])
    noisy = y.clone()
    return (x[:1300], noisy[:1300]), (x[1300:], y[1300:])


class Task:
    """A model, its data and its optimizer."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.adam = name, steps, name == "gpt"
        self.rate = {"gpt": 2e-3, "lstm": 0.5, "cnn": 0.05}[name]
        self.batch, self.length = {"gpt": (32, 32), "lstm": (32, 24), "cnn": (64, 0)}[name]
        self.options = {"steps": steps} if self.adam else {"sparsity": 0.99}
        self.train, self.test = digits() if name == "cnn" else texts()

    def model(self) -> nn.Module:
        return {"gpt": GPT, "lstm": LSTM, "cnn": CNN}[self.name]()

    def batches(self, count: int, generator: torch.Generator):
        if self.name == "cnn":
            x, y = self.train
            chosen = torch.randint(len(x), (count,), generator=generator)
            return x[chosen], y[chosen]
        return sequences(self.train, count, generator, self.length)

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(out.flatten(0, -2), y.flatten())

    def evaluate(self, model: nn.Module) -> float:
        with torch.no_grad():
            if self.name == "cnn":
                return float(self.loss(model(self.test[0]), self.test[1]))
            x, y = sequences(self.test, 256, torch.Generator().manual_seed(99), self.length)
            return float(self.loss(model(x), y))


SHIPPED = owners.SUMS_PER_ENTRY, owners.SUM_VALUES


def choose(word: str) -> None:
    """Patch the core's budget for one training, and let owners add up even where they do not pay."""
    owners.SUMS_PER_ENTRY, owners.SUM_VALUES = SHIPPED
    if word not in ("gather", "owners"):
        sums, codec = word.split(":")
        owners.SUMS_PER_ENTRY, owners.SUM_VALUES = float(sums), {"int2": (codec,)}
    choice.OWNERS_SHARE = math.inf


def train(task: Task, ranks: int, word: str, seed: int, per_rank: bool) -> dict:
    """Train once; returns the losses and the bytes that a rank receives in the last step."""
    torch.manual_seed(seed)
    model = task.model()
    names, params = zip(*model.named_parameters(), strict=True)
    generator = torch.Generator().manual_seed(seed)
    batch = (task.batch // 4 if per_rank else max(1, task.batch // ranks)) * ranks

    def loss_of(values, x, y):
        return task.loss(functional_call(model, dict(zip(names, values, strict=True)), (x,)), y)

    gradients_of = vmap(grad(loss_of), in_dims=(None, 0, 0))
    exchanges = []
    if word != "dense":
        choose(word)
        way = "gather" if word == "gather" else "auto"
        options = {"momentum": 0.0 if task.adam else 0.9, "exchange": way, **task.options}
        config = make_config(options).suited(task.adam)
        layout = make_layout(
            [Parameter(n, tuple(p.shape), "float32") for n, p in zip(names, params, strict=True)], config
        )
        exchanges = [Exchange(layout, config, t, NumbaKernels(1)) for t in local_world(ranks)]
    u = [torch.zeros_like(p) for p in params]
    second = [torch.zeros_like(p) for p in params]
    losses, count = [], len(params)
    for step in range(task.steps):
        rate = task.rate * min(1, (step + 1) / 20) * (1 - step / task.steps)
        x, y = task.batches(batch, generator)
        x, y = x.view(ranks, -1, *x.shape[1:]), y.view(ranks, -1, *y.shape[1:])
        each = [g.reshape(ranks, -1) for g in gradients_of(tuple(p.detach() for p in params), x, y)]
        momentum, gain = running_mean(BETA1, step + 1) if task.adam else (0.9, 1.0)
        if exchanges:
            hyper = Hyper([momentum] * count, [False] * count, [0.0] * count, [gain] * count)
            results = []
            for r, exchange in enumerate(exchanges):
                out = [np.zeros(p.numel(), np.float32) for p in params]
                exchange.begin(StepOptions(hyper=hyper))
                for i in reversed(range(count)):
                    exchange.submit(i, np.ascontiguousarray(each[i][r].numpy()), out[i])
                results.append(out)
            refused = [exchange.finish() for exchange in exchanges]
            assert not any(refused)
            means = [torch.from_numpy(result).view_as(p) for result, p in zip(results[0], params, strict=True)]
            squared = means
        else:
            squared = [g.mean(0).view_as(p) for g, p in zip(each, params, strict=True)]
            momentum, gain = (BETA1, 1 - BETA1) if task.adam else (0.9, 1.0)
            for a, g in zip(u, squared, strict=True):
                a.mul_(momentum).add_(g, alpha=gain)
            means = [a / (1 - BETA1 ** (step + 1)) for a in u] if task.adam else u
        with torch.no_grad():
            for p, m, s, g in zip(params, means, second, squared, strict=True):
                if task.adam:
                    s.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
                    p.mul_(1 - rate * 0.01).addcdiv_(m, (s / (1 - BETA2 ** (step + 1))).sqrt() + EPS, value=-rate)
                else:
                    p.sub_(m, alpha=rate)
        if (step + 1) % max(1, task.steps // 4) == 0:
            losses.append(round(task.evaluate(model), 4))
    received = exchanges[0].stats.last.bytes_received if exchanges else 0
    for exchange in exchanges:
        exchange.close()
    return {"losses": losses, "received": received}


def main() -> None:
    """Train, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["gpt", "lstm", "cnn"])
    parser.add_argument("ranks", type=int)
    parser.add_argument("words", nargs="+")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task, per_rank = Task(arguments.task, arguments.steps), "batch" in arguments.words
    for seed in arguments.seeds:
        for word in arguments.words:
            if word == "batch":
                continue
            since = time.perf_counter()
            row = {"task": task.name, "ranks": arguments.ranks, "steps": task.steps, "training": word, "seed": seed}
            row |= {"per_rank": per_rank, **train(task, arguments.ranks, word, seed, per_rank)}
            print(row, f"{time.perf_counter() - since:.0f} s", flush=True)
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

r"""Train with DGC and AdamW, Adam or SGD on some tasks, over Gloo: the loss, and the bytes of the whole run.

    torchrun --nproc-per-node 2 benchmarks/adaptive.py gpt 1200 dense density=0.05,beta2=0.99,from=0.2 --seeds 0 1

Each word after the number of steps is one training: ``dense``; ``fp16`` and ``powersgd=4``, DDP's hooks, the latter of
that rank; ``onebit=0.15``, a hook as in 1-bit Adam, after dense steps that are this share of all; ``diloco=80``, that
many local steps between two exchanges, and ``local=80``, the same with plain averages of parameters; ``steps``, classic
error feedback: the optimizer as it is, and ``Compression.dgc(steps=..., error_feedback="classic")``; ``classic``, the
same without ``steps=``; ``steps,momentum=0``, the same with beta1 left in the optimizer; or DGC's settings, joined by
commas. Equal steps, rates and data for all. With ``--json FILE`` the rows are added to a file, and trainings that it
holds already are not repeated.

``--timed RATE`` evaluates nothing and writes the medians of the last half of the steps: the time, the bytes, and the
processor time of a rank, which depends less on what else the machine does. The hosts and links of that rate are those
of ``benchmarks/network`` (root and iproute2 needed):

    python benchmarks/network/run.py --hosts 2 --rate 1gbit --pin -- sh -c 'MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 \
      WORLD_SIZE=2 RANK=$OMPI_COMM_WORLD_RANK python benchmarks/adaptive.py gpt-10m 14 dense steps --timed 1gbit'

``ahead`` is step-ahead error feedback as a user writes it, and takes ``density`` (one, or two joined by "/": the first
holds for a fifth of the steps), ``values``, ``small`` and ``late=1``. With ``steps=0``, dgc is not told the number of
steps. With ``saved=1``, all ranks go on after half of the steps from the model and the optimizer of rank 0, as a script
does that saves there without ``average()``.

Settings of DGC: ``density`` of the entries sent; ``ramp``, a share of the steps at whose equal parts the ``first``
densities are sent (``first=0.25/0.0625``); ``beta2`` in the optimizer, ``from`` a share of the steps on; ``masking``;
``values``, ``small``, codecs; ``moved=0`` leaves the first moment in the optimizer; ``dense``, a share of the steps
that are plain AdamW with float32 gradients before anything is compressed; ``frozen=1`` keeps the second moment as it is
after them, or after ``from``. ``lr`` is the highest rate of any training, ``dense,lr=0.002`` too. ``jitter=0.001``
multiplies the initial weights of any training by 1 plus noise of that size.

Except with ``steps`` and ``classic``, the first moment is moved into the compressor by hand: the compressor's momentum
is beta1, and the optimizer's beta1 is 0. The velocity is then 1 / (1 - beta1) times the first moment, so eps is
multiplied by that.
Bytes are those that a rank hands to collectives for gradients, dense steps included; their ratio is to float32.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from machine import facts  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: E402
from torch.nn import functional  # noqa: E402

import dgc.torch as dgc  # noqa: E402

Batches = Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
FROZEN = 1 - 1e-9
"""The beta2 of a second moment that stays: torch divides by 0 at 1."""


class Block(nn.Module):
    """Attention and a network of two layers, both after a normalisation and beside what comes in."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        parts = self.qkv(self.before(x)).view(count, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).reshape(count, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Blocks between an embedding with learnt positions and a linear layer, of all tokens or of their mean."""

    def __init__(
        self, embed: nn.Module, length: int, width: int, layers: int, heads: int, classes: int, causal: bool
    ) -> None:
        super().__init__()
        self.embed, self.causal = embed, causal
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal) for _ in range(layers)))
        self.norm, self.classes = nn.LayerNorm(width), nn.Linear(width, classes, bias=not causal)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if last else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if isinstance(embed, Patches):
            nn.init.normal_(self.positions, std=0.2)
            nn.init.normal_(embed.linear.weight, std=0.25)
        if isinstance(embed, nn.Embedding):
            self.classes.weight = embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks(self.embed(x) + self.positions))
        return self.classes(x if self.causal else x.mean(1))


@dataclass(frozen=True)
class Task:
    """A model, its data and its optimizer."""

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Batches, list[tuple[torch.Tensor, torch.Tensor]]]]
    """-> a function that draws one rank's batch, and the batches to evaluate."""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    clip: float | None
    rate: Callable[[float], float]
    """Share of the steps that were made -> what the learning rate is multiplied by."""


def cosine(progress: float) -> float:
    """A rise over 4 % of the steps, then half a cosine down to 0."""
    return min(1.0, progress / 0.04 + 0.01) * (1 + math.cos(math.pi * progress)) / 2


# -- text -------------------------------------------------------------------------------------------------------------


def _text(length: int, count: int) -> tuple[Batches, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Bytes of the standard library's modules; every twentieth one is held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(folder.rglob("*.py")) if not {"site-packages", "test", "tests"} & set(p.parts)]
    train, held = (
        torch.tensor(np.frombuffer(b"".join(p.read_bytes() for p in part), np.uint8).copy())
        for part in ([p for i, p in enumerate(files) if i % 20 != 10], files[10::20])
    )
    span = torch.arange(length + 1)

    def windows(text: torch.Tensor, begins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = text[begins[:, None] + span].long()
        return found[:, :-1], found[:, 1:]

    def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return windows(train, torch.randint(len(train) - length, (count,), generator=generator))

    places = torch.linspace(0, len(held) - length - 1, 512).long()
    return draw, [windows(held, part) for part in places.split(64)]


def _gpt(length: int, width: int, layers: int, heads: int) -> nn.Module:
    return Transformer(nn.Embedding(256, width), length, width, layers, heads, 256, causal=True)


def _plain_gpt() -> nn.Module:
    """The GPT with torch's initial values and a last layer of its own."""
    model = _gpt(64, 96, 3, 4)
    model.classes.weight = nn.Parameter(model.classes.weight.detach().clone())
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.reset_parameters()
    return model


def _language_loss(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def _gpt_task(length: int, count: int, width: int, layers: int, heads: int, lr: float) -> Task:
    options = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return Task(
        functools.partial(_gpt, length, width, layers, heads),
        functools.partial(_text, length, count),
        _language_loss,
        torch.optim.AdamW,
        options,
        1.0,
        cosine,
    )


# -- a table ----------------------------------------------------------------------------------------------------------


def _table() -> tuple[Batches, list[tuple[torch.Tensor, torch.Tensor]]]:
    """24 features of unlike distributions, and a target made of steps, waves and products of some, and noise."""
    rng = np.random.default_rng(5)
    rows, held = 60_000, 8_000
    x = rng.standard_normal((rows, 24))
    x[:, 12:18] = np.exp(0.7 * x[:, 12:18] + 0.5 * x[:, :6])
    x[:, 18:] = np.floor(2 * x[:, 18:])
    steps = sum(
        c * np.prod([x[:, i] > np.quantile(x[:, i], q) for i, q in zip(some, cuts, strict=True)], axis=0)
        for c, some, cuts in (
            (rng.normal(), rng.choice(24, 3, replace=False), rng.uniform(0.2, 0.7, 3)) for _ in range(40)
        )
    )
    waves = sum(rng.normal() * np.sin(1.5 * x[:, :12] @ (rng.standard_normal(12) / 2)) for _ in range(8))
    stepped, waved = np.asarray(steps), np.asarray(waves)
    clean = stepped / stepped.std() + waved / waved.std() + np.tanh(x[:, 0] * x[:, 3])
    y = (clean - clean.mean()) / clean.std() + 0.2 * rng.standard_normal(rows)
    x = (x - x.mean(0)) / x.std(0)
    features, target = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None]

    def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(held, rows, (64,), generator=generator)
        return features[chosen], target[chosen]

    return draw, list(zip(features[:held].split(1000), target[:held].split(1000), strict=True))


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(24, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
    )


# -- images -----------------------------------------------------------------------------------------------------------


def _digits() -> tuple[Batches, list[tuple[torch.Tensor, torch.Tensor]]]:
    """scikit-learn's digits anywhere on 12 x 12 pixels, beside quarters of other digits and noise."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8).astype("f") / 16
    rng = np.random.default_rng(5)
    order = rng.permutation(len(images))

    def canvases(of: np.ndarray, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = 0.15 * rng.standard_normal((count, 12, 12)).astype("f")
        chosen = rng.choice(of, count)
        for canvas, one in zip(made, chosen, strict=True):
            for other in rng.choice(of, 3):
                (a, b), (c, d) = rng.integers(0, 9, 2), rng.integers(0, 5, 2)
                canvas[a : a + 4, b : b + 4] += images[other, c : c + 4, d : d + 4]
            a, b = rng.integers(0, 5, 2)
            canvas[a : a + 8, b : b + 8] = images[one] + 0.15 * rng.standard_normal((8, 8))
        return torch.tensor(made), torch.tensor(labels[chosen])

    (train, right), (held, wanted) = canvases(order[450:], 30_000), canvases(order[:450], 3_000)

    def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(len(train), (24,), generator=generator)
        return train[chosen], right[chosen]

    return draw, list(zip(held.split(500), wanted.split(500), strict=True))


class Patches(nn.Module):
    """9 pieces of 4 x 4 pixels, each as a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(16, width)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(functional.unfold(images[:, None], 4, stride=4).transpose(1, 2))


def _vit() -> nn.Module:
    return Transformer(Patches(64), 9, 64, 3, 4, 10, causal=False)


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 12)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(576, 256), nn.ReLU(),
        nn.Linear(256, 10),
    )  # fmt: skip


def _photographs() -> tuple[Batches, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Pieces of 32 x 32 pixels of scikit-learn's two photographs, with noise; their right quarters are held out."""
    from sklearn.datasets import load_sample_images

    photographs = torch.tensor(np.stack(load_sample_images().images)).permute(0, 3, 1, 2).float() / 255

    def pieces(columns: range, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        which = torch.randint(2, (count,), generator=generator).tolist()
        rows = torch.randint(photographs.shape[2] - 32, (count,), generator=generator).tolist()
        begins = torch.randint(columns.start, columns.stop - 32, (count,), generator=generator).tolist()
        clean = torch.stack(
            [photographs[i, :, a : a + 32, b : b + 32] for i, a, b in zip(which, rows, begins, strict=True)]
        )
        return clean + 0.25 * torch.randn(clean.shape, generator=generator), clean

    noisy, clean = pieces(range(480, 640), 512, torch.Generator().manual_seed(5))
    return functools.partial(pieces, range(480), 8), list(zip(noisy.split(64), clean.split(64), strict=True))


class UNet(nn.Module):
    """Removes noise: convolutions at three sizes of the image, each beside what they found on the way down."""

    def __init__(self) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.Conv2d(after, after, 3, padding=1), nn.ReLU()
            )

        self.first, self.second, self.bottom = block(3, 24), block(24, 48), block(48, 96)
        self.up, self.upper = nn.ConvTranspose2d(96, 48, 2, stride=2), nn.ConvTranspose2d(48, 24, 2, stride=2)
        self.third, self.last, self.colours = block(96, 48), block(48, 24), nn.Conv2d(24, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(functional.max_pool2d(first, 2))
        third = self.third(torch.cat([second, self.up(self.bottom(functional.max_pool2d(second, 2)))], 1))
        return x + self.colours(self.last(torch.cat([first, self.upper(third)], 1)))


def _percent_of_variance(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean square of the error, in per cent of the noise's."""
    return 100 * functional.mse_loss(found, wanted) / 0.25**2


class Lstm(nn.Module):
    """Reads text byte by byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(256, 64), nn.LSTM(64, 256, batch_first=True)
        self.classes = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classes(self.lstm(self.embed(x))[0])


_NESTEROV = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}

TASKS = {
    "cnn": Task(_cnn, _digits, functional.cross_entropy, torch.optim.SGD, {"lr": 0.1, **_NESTEROV}, None, cosine),
    "unet": Task(UNet, _photographs, _percent_of_variance, torch.optim.SGD, {"lr": 0.01, **_NESTEROV}, 10.0, cosine),
    "lstm": Task(
        Lstm,
        functools.partial(_text, 64, 16),
        _language_loss,
        torch.optim.SGD,
        {"lr": 0.5, **_NESTEROV},
        1.0,
        cosine,
    ),
    "gpt": _gpt_task(64, 4, 96, 3, 4, 3e-3),
    "table": Task(_mlp, _table, functional.mse_loss, torch.optim.Adam, {"lr": 1e-3}, None, lambda progress: 1.0),
    "vit": Task(
        _vit, _digits, functional.cross_entropy, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.05}, None, cosine
    ),
    "gpt-plain": Task(
        _plain_gpt,
        functools.partial(_text, 64, 4),
        _language_loss,
        torch.optim.AdamW,
        {"lr": 1e-3, "weight_decay": 0.1},
        None,
        lambda progress: 1.0,
    ),
    "gpt-10m": _gpt_task(64, 4, 384, 6, 6, 1e-3),
    "gpt-19m": _gpt_task(64, 4, 448, 8, 8, 8e-4),
}


class Lion(torch.optim.Optimizer):
    """The sign of a mean of gradients, with decoupled decay. Source: Chen et al. 2023, arXiv 2302.06675."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.defaults["decoupled_weight_decay"] = True
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            now, later = group["betas"]
            for p in group["params"]:
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.lerp(p.grad, mean, now).sign_(), alpha=group["lr"])
                mean.lerp_(p.grad, 1 - later)


class Muon(torch.optim.Optimizer):
    """Steps of orthogonal matrices, and Adam for vectors. Source: Jordan 2024, kellerjordan.github.io/posts/muon.

    A matrix's step has the size of one of AdamW: 0.2 on average. Source of this: arXiv 2502.16982.
    """

    def __init__(
        self, parameters: Any, lr: float, momentum: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        decay = {"weight_decay": weight_decay, "decoupled_weight_decay": True}
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "betas": betas, **decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                if p.dim() == 2:
                    mean = state["mean"].lerp_(p.grad, 1 - group["momentum"])
                    update = orthogonal(p.grad.lerp(mean, group["momentum"])) * 0.2 * max(p.shape) ** 0.5
                else:
                    mean = state["mean"].lerp_(p.grad, 1 - beta1) / (1 - beta1 ** state["step"])
                    square = state["square"].lerp_(p.grad.square(), 1 - beta2) / (1 - beta2 ** state["step"])
                    update = mean / (square.sqrt() + 1e-8)
                p.sub_(update, alpha=group["lr"])


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return nearly the orthogonal matrix that is nearest, by five Newton-Schulz iterations."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


OTHERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "alpha": 0.95}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "muon": (Muon, {"lr": 3e-3, "momentum": 0.95, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    "lion": (Lion, {"lr": 4e-4, "betas": (0.9, 0.98), "weight_decay": 0.5}),
}


# -- trainings --------------------------------------------------------------------------------------------------------


class Dense:
    """The mean gradient in float32, clipped."""

    def __init__(self, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._clip, self._model, self._optimizer, self.bytes = task.clip, model, optimizer, 0

    def step(self) -> None:
        gradients = [p.grad for p in self._model.parameters()]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        self.bytes += 4 * flat.numel()
        flat /= dist.get_world_size()
        if self._clip:
            flat *= min(1.0, self._clip / (flat.norm().item() + 1e-6))
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        self._optimizer.step()


class Hooked:
    """DDP with one of its own hooks: fp16, or PowerSGD of a rank, after two dense steps."""

    def __init__(self, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None) -> None:
        self._clip, self._model, self._optimizer = task.clip, model, optimizer
        # One bucket: with several, Gloo's threads begin the collectives in another order on each rank, and wait.
        self.forward = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=10_000)
        self._all, self._made, self._state = sum(p.numel() for p in model.parameters()), 0, None
        if rank is None:
            self.forward.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            self._state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            self.forward.register_comm_hook(self._state, powerSGD_hook.powerSGD_hook)

    @property
    def bytes(self) -> int:
        if self._state is None:
            return 2 * self._all * self._made
        return 4 * (2 * self._all + self._state.compression_stats()[2])

    def step(self) -> None:
        if self._clip:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._made += 1


class OneBit:
    """DDP with a hook as in 1-bit Adam (Tang et al., 2021).

    The first ``dense`` steps are Adam's. Then its second moment stays as it is, and every rank adds its own gradient to
    the mean first moment, sends the signs and one scale for each row of a matrix, and adds what that leaves out in the
    next step. The messages of all ranks are gathered and averaged; 1-bit Adam compresses this mean once more, which on
    two ranks saves no bytes. A rank's gradient is clipped to the norm times the square root of the ranks, as dgc does.
    """

    def __init__(self, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, dense: int) -> None:
        self._clip, self._optimizer, self._dense, self._made, self.bytes = task.clip, optimizer, dense, 0, 0
        self._model, self._ranks = model, dist.get_world_size()
        self._first: dict[nn.Parameter, torch.Tensor] = {}  # the mean first moment
        self._left: dict[nn.Parameter, torch.Tensor] = {}  # what this rank has not sent
        self.forward = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=10_000)
        self.forward.register_comm_hook(None, lambda _, bucket: self._hook(bucket))

    def step(self) -> None:
        if self._clip and self._made < self._dense:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._made += 1
        if self._made == self._dense:
            (group,) = self._optimizer.param_groups
            self._beta, second = group["betas"]
            freeze(self._optimizer, second)
            group["betas"] = (0.0, FROZEN)
            for parameter, state in self._optimizer.state.items():
                self._first[parameter] = state["exp_avg"].clone()
                self._left[parameter] = torch.zeros_like(parameter)

    def _hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        if self._made < self._dense:
            self.bytes += 4 * flat.numel()
            return default_hooks.allreduce_hook(None, bucket)
        limit = (self._clip or math.inf) * math.sqrt(self._ranks)
        weight = (1 - self._beta) * min(1.0, limit / (flat.norm().item() + 1e-6))
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        scales, signs = [], []
        for parameter, gradient in pairs:
            wanted = self._left[parameter].add_(self._first[parameter], alpha=self._beta).add_(gradient, alpha=weight)
            rows = wanted if wanted.dim() == 2 else wanted[None]
            scales.append(rows.abs().mean(1))
            signs.append(rows >= 0)
            rows -= torch.where(signs[-1], scales[-1][:, None], -scales[-1][:, None])
        packed = np.packbits(torch.cat([each.flatten() for each in signs]).numpy())
        message = torch.cat([torch.cat(scales).view(torch.uint8), torch.from_numpy(packed)])
        self.bytes += message.numel()
        messages = [torch.empty_like(message) for _ in range(self._ranks)]
        dist.all_gather(messages, message)
        flat.zero_()
        for each in messages:
            self._add(each, pairs)
        for parameter, gradient in pairs:
            self._first[parameter].copy_(gradient)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(flat)
        return done

    def _add(self, message: torch.Tensor, pairs: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Add a rank's share of the mean to the gradients."""
        rows = [len(p) if p.dim() == 2 else 1 for p, _ in pairs]
        scales = message[: 4 * sum(rows)].view(torch.float32) / self._ranks
        signs = torch.from_numpy(np.unpackbits(message[4 * sum(rows) :].numpy()))
        begin = 0
        for (_, gradient), scale in zip(pairs, scales.split(rows), strict=True):
            part = signs[begin : begin + gradient.numel()].view(len(scale), -1)
            gradient += torch.where(part > 0, scale[:, None], -scale[:, None]).view_as(gradient)
            begin += gradient.numel()


class DiLoCo:
    """Local steps. Every ``length`` steps, and after the last one, Nesterov's SGD steps by the mean of their updates.

    Source: Douillard et al. 2023, arXiv 2311.08105, whose outer rate is 0.7, and the momentum 0.9. With a rate of 1 and
    no momentum, the parameters are averaged.
    """

    def __init__(
        self, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, length: int, steps: int, rate: float,
        momentum: float,
    ) -> None:  # fmt: skip
        self._clip, self._own, self._optimizer = task.clip, list(model.parameters()), optimizer
        self._length, self._left, self._made, self.bytes = length, steps, 0, 0
        self._shared = [nn.Parameter(p.detach().clone()) for p in self._own]
        self._outer = torch.optim.SGD(self._shared, rate, momentum=momentum, nesterov=momentum > 0)

    def step(self) -> None:
        if self._clip:
            nn.utils.clip_grad_norm_(self._own, self._clip)
        self._optimizer.step()
        self._made += 1
        self._left -= 1
        if self._made % self._length and self._left:
            return
        for shared, p in zip(self._shared, self._own, strict=True):
            shared.grad = shared.detach() - p.detach()
            dist.all_reduce(shared.grad)
            shared.grad /= dist.get_world_size()
            self.bytes += 4 * p.numel()
        self._outer.step()
        with torch.no_grad():
            for shared, p in zip(self._shared, self._own, strict=True):
                p.copy_(shared)


class DGC:
    """dgc's optimizer, from the first step on or after dense ones."""

    def __init__(
        self, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, str], steps: int
    ) -> None:
        self._task, self._model, self._optimizer, self._given = task, model, optimizer, given
        self._after = round(float(given.get("dense", 0)) * steps)
        self._steps, self._made = steps, 0
        self._first: Dense | None = Dense(task, model, optimizer) if self._after else None
        if self._first is None:
            self._begin()

    @property
    def bytes(self) -> int:
        first = self._first.bytes if self._first else 0
        return first + (self._compression.stats.total.bytes_sent if self._made >= self._after else 0)

    def step(self) -> None:
        if self._first and self._made < self._after:
            self._first.step()
        else:
            if self._first and self._made == self._after:
                self._begin()
                for p in self._model.parameters():
                    p.grad = None
            self._optimizer.step()
        self._made += 1

    def _begin(self) -> None:
        options: dict[str, Any] = {"error_feedback": "classic"} | ({"steps": self._steps} if self._steps else {})
        if "density" in self._given:
            options = self._by_hand()
        if "momentum" in self._given:
            options["momentum"] = float(self._given["momentum"])
        if self._task.clip:
            options |= {"local_grad_clip_norm": self._task.clip, "clip_scope": "global"}
        self._compression = dgc.Compression.dgc(**options)
        dgc.DistributedOptimizer(self._optimizer, self._model.named_parameters(), compression=self._compression)

    def _by_hand(self) -> dict[str, Any]:
        given, left = self._given, self._given.get("moved") == "0"
        group = self._optimizer.param_groups[0]
        first, second = group["betas"]
        if not left:
            scale = 1 / (1 - first)
            wanted = second if "from" in given else float(given.get("beta2", second))
            freeze(self._optimizer, second, scale**2)  # of dense steps
            group["betas"] = (0.0, FROZEN if given.get("frozen") == "1" and "from" not in given else wanted)
            group["eps"] *= scale
        elif "beta2" in given:
            group["betas"] = (first, float(given["beta2"]))
        options: dict[str, Any] = {"momentum": 0.0 if left else first}
        densities = [float(d) for d in given["first"].split("/")] if "first" in given else []
        if densities:
            length = math.ceil(float(given["ramp"]) * self._steps * (len(densities) + 1) / len(densities))
            options["rampup_step"] = length
        options["sparsity"] = [1 - d for d in (*densities, float(given["density"]))]
        options["momentum_masking"] = given.get("masking", "1") == "1"
        return options | {name: given[name] for name in ("values", "small") if name in given}


class Ahead:
    """Step-ahead error feedback by dgc's optimizer; the script clips the gradient of its own rank."""

    def __init__(
        self, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, str], steps: int
    ) -> None:
        self._clip, self._model, self._optimizer, self._scheduled = task.clip, model, optimizer, optimizer
        self._steps = steps
        knows = "density" not in given and given.get("steps") != "0"
        self._left = 0 if knows else steps  # with steps=, the last step averages
        self._resumes_in, self._before = steps // 2 if given.get("saved") == "1" else 0, 0
        options: dict[str, Any] = {"steps": steps} if knows else {}
        if "density" in given:
            densities = [float(d) for d in given["density"].split("/")]
            options = {"sparsity": [1 - d for d in densities]}
            if len(densities) > 1:
                options["rampup_step"] = math.ceil(len(densities) * steps / 5)
        options |= {name: given[name] for name in ("values", "small") if name in given}
        self._options = options | {"late": given.get("late") == "1", "error_feedback": "step-ahead"}
        self._wrap()

    @property
    def bytes(self) -> int:
        return self._before + self._compression.stats.total.bytes_sent

    def _wrap(self) -> None:
        self._compression = dgc.Compression.dgc(**self._options)
        dgc.DistributedOptimizer(self._optimizer, self._model.named_parameters(), compression=self._compression)

    def _resume(self) -> None:
        """Go on from the model and the optimizer of rank 0, as a script does that saves there without average()."""
        self._before = self.bytes
        self._compression.close()
        states = [v for state in self._optimizer.state.values() for v in state.values()]
        for tensor in (*self._model.parameters(), *states):
            dist.broadcast(tensor.detach(), 0)
        self._optimizer = type(self._scheduled)([dict(group) for group in self._scheduled.param_groups])
        self._optimizer.load_state_dict(self._scheduled.state_dict())
        self._left = self._steps - self._steps // 2
        self._wrap()

    def step(self) -> None:
        if self._clip:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        for group, scheduled in zip(self._optimizer.param_groups, self._scheduled.param_groups, strict=True):
            group["lr"] = scheduled["lr"]
        self._optimizer.step()
        self._left -= 1
        self._resumes_in -= 1
        if not self._left:
            self._compression.average()
        elif not self._resumes_in:
            self._resume()


def freeze(optimizer: torch.optim.Optimizer, second: float, scale: float = 1.0) -> None:
    """Correct the bias of the second moments now, so that a beta2 of nearly 1 does not correct it again."""
    for state in optimizer.state.values():
        state["exp_avg_sq"] *= scale / (1 - second ** state["step"].item())
        state["step"].fill_(1e12)


def train(task: Task, data: Any, word: str, steps: int, seed: int, points: int) -> dict[str, Any]:
    """One training with a curve of some points; the row is the same on all ranks but for the bytes and seconds."""
    draw, held = data
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters(), **task.options)
    given = dict(part.split("=") for part in word.split(",") if "=" in part)
    if "jitter" in given:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + float(given["jitter"]) * torch.randn_like(p))
    rate, generator = (
        float(given.get("lr", task.options["lr"])),
        torch.Generator().manual_seed(1000 * seed + dist.get_rank()),
    )
    method: Any
    if word.startswith("dense") and not word.startswith("dense="):
        method = Dense(task, model, optimizer)
    elif word == "fp16" or "powersgd" in given:
        method = Hooked(task, model, optimizer, int(given["powersgd"]) if "powersgd" in given else None)
    elif "onebit" in given:
        method = OneBit(task, model, optimizer, round(float(given["onebit"]) * steps))
    elif "diloco" in given:
        method = DiLoCo(task, model, optimizer, int(given["diloco"]), steps, rate=0.7, momentum=0.9)
    elif "local" in given:
        method = DiLoCo(task, model, optimizer, int(given["local"]), steps, rate=1.0, momentum=0.0)
    elif word.startswith("ahead"):
        method = Ahead(task, model, optimizer, given, steps)
    else:
        method = DGC(task, model, optimizer, given, 0 if word == "classic" else steps)
    forward, curve, began, ends = getattr(method, "forward", model), [], time.monotonic(), []
    for step in range(steps):
        if "from" in given and step == round(float(given["from"]) * steps):
            group = optimizer.param_groups[0]
            if given.get("frozen") == "1":
                freeze(optimizer, group["betas"][1])
            group["betas"] = (group["betas"][0], FROZEN if given.get("frozen") == "1" else float(given["beta2"]))
        for group in optimizer.param_groups:
            group["lr"] = rate * task.rate(step / steps)
        optimizer.zero_grad()
        inputs, wanted = draw(generator)
        task.loss(forward(inputs), wanted).backward()
        method.step()
        ends.append((time.monotonic(), time.process_time(), method.bytes))
        if points and (step + 1) % max(1, steps // points) == 0:
            curve.append([step + 1, *evaluated(task, model, held)])
    if not points:
        last = ends[-(steps // 2) - 1 :]
        seconds, processor, sent = (
            statistics.median(end[i] - begin[i] for begin, end in itertools.pairwise(last)) for i in range(3)
        )
        return {
            "setting": word, "seed": seed, "steps": steps, "step": seconds, "processor": processor, "step_bytes": sent,
        }  # fmt: skip
    size = sum(p.numel() for p in model.parameters())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    constant = task.rate(0.99) == 1  # the rate does not fall: one evaluation is noisy
    row = {
        "setting": word,
        "seed": seed,
        "steps": steps,
        "parameters": size,
        "loss": statistics.fmean(point[1] for point in curve[-3:]) if constant else curve[-1][1],
        "fewer": 4 * size * steps / method.bytes,
        "bytes": method.bytes,
        "identical": all(torch.equal(weights, other) for other in others),
        "seconds": round(time.monotonic() - began, 1),
        "curve": [[round(v, 5) for v in point] for point in curve],
    }
    if len(curve[-1]) > 2:
        row["accuracy"] = curve[-1][2]
    return row


@torch.no_grad()
def evaluated(task: Task, model: nn.Module, held: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """The mean loss of what is held out and, of classes of images, the share that is right in %; all ranks together."""
    own = held[dist.get_rank() :: dist.get_world_size()]
    outputs = [(model(inputs), wanted) for inputs, wanted in own]
    found = [sum(task.loss(*pair).item() for pair in outputs)]
    if outputs[0][1].dim() == 1:
        found.append(100 * sum((o.argmax(1) == w).float().mean().item() for o, w in outputs))
    total = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / len(held)).tolist()


def main() -> None:
    """Train what the command line says; rank 0 writes after each training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("steps", type=int)
    parser.add_argument(
        "settings",
        nargs="+",
        help="dense, fp16, powersgd=RANK, onebit=SHARE, diloco=STEPS, local=STEPS, or DGC's: see above",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--batch", type=int, help="sequences of a rank in a step, for the GPTs")
    parser.add_argument("--beta1", type=float, help="another beta1 of the optimizer")
    parser.add_argument("--optimizer", choices=OTHERS, help="another optimizer, at a rate that suits the small GPT")
    parser.add_argument("--points", type=int, default=6, help="at which the held-out loss is measured")
    parser.add_argument("--timed", metavar="RATE", help="only the seconds of a step, over links of this rate")
    parser.add_argument("--json", type=Path, help="rows are added to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task, first = TASKS[options.task], int(os.environ["RANK"]) == 0
    if options.beta1 is not None:
        task = replace(task, options={**task.options, "betas": (options.beta1, task.options["betas"][1])})
    if options.optimizer is not None:
        optimizer, given = OTHERS[options.optimizer]
        task = replace(task, optimizer=optimizer, options=given)
    data = task.data() if options.batch is None else _text(64, options.batch)
    report: dict[str, Any] = {"task": options.task, "ranks": dist.get_world_size(), "rows": []}
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text())
    report |= facts("torch", "numpy", "numba") | {
        name: getattr(options, name) for name in ("batch", "beta1", "optimizer") if getattr(options, name) is not None
    }
    done = {(row["setting"], row["steps"], row["seed"], row.get("rate")) for row in report["rows"]}
    dist.barrier()
    for seed in options.seeds:
        for word in options.settings:
            if (word, options.steps, seed, options.timed) in done:
                continue
            row = train(task, data, word, options.steps, seed, 0 if options.timed else options.points)
            if first:
                said = f"{options.task} {options.steps} {word} seed {seed}:"
                if options.timed:
                    row["rate"] = options.timed
                    print(said, f"{row['step']:.3f} s a step at {options.timed},",
                          f"{row['processor']:.3f} s of the processor", flush=True)  # fmt: skip
                else:
                    print(said, f"loss {row['loss']:.4f}",
                          f"{row.get('accuracy', 0):.2f} fewer {row['fewer']:.1f} {row['seconds']} s",
                          "" if row["identical"] else "RANKS DIFFER", flush=True)  # fmt: skip
                report["rows"].append(row)
                if options.json:
                    head = json.dumps({k: v for k, v in report.items() if k != "rows"}, indent=1).removesuffix("\n}")
                    lines = ",\n".join(f"  {json.dumps(row)}" for row in report["rows"])
                    options.json.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

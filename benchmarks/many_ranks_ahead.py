"""Train the small GPT of adaptive.py with AdamW and step-ahead error feedback on many ranks of one process.

    taskset -c 0 python benchmarks/many_ranks_ahead.py 64 dense ahead ahead=0.2 --seeds 0 1 --json FILE

Each word after the number of ranks is one training: ``dense``; ``ahead``, with the entries that dgc chooses for this
number of ranks; or ``ahead=DENSITY``. ``--sequences`` are those of all ranks in a step. Each rank clips its own
gradient. Every rank has the core's own exchange over :mod:`dgc.transport.local`; gradients and optimizer steps of all
ranks are computed together. On one core (``taskset``) the ranks' threads take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
from adaptive import TASKS, _text  # noqa: E402
from machine import facts  # noqa: E402
from torch import nn  # noqa: E402
from torch.func import functional_call, grad, vmap  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from dgc.core.compressors import make_config  # noqa: E402
from dgc.core.kernels.cpu import NumbaKernels  # noqa: E402
from dgc.core.layout import Parameter  # noqa: E402
from dgc.core.step_ahead import StepAhead  # noqa: E402
from dgc.transport.local import local_world  # noqa: E402

TASK = TASKS["gpt"]


def engines(word: str, steps: int, named: dict[str, torch.Tensor], ranks: int) -> list[StepAhead]:
    """Build one exchange of updates for each rank; none for dense training."""
    if word == "dense":
        return []
    _, _, density = word.partition("=")
    given = {"sparsity": 1 - float(density)} if density else {"steps": steps}
    config = make_config({"error_feedback": "step-ahead", **given}).suited(adaptive=True).on_ranks(ranks)
    parameters = [Parameter(name, tuple(p.shape), "float32") for name, p in named.items()]
    return [StepAhead(parameters, config, t, NumbaKernels(1), rescales=True) for t in local_world(ranks)]


def train(word: str, ranks: int, steps: int, seed: int, data: Any) -> dict[str, Any]:
    """Train once; return the loss of held-out text, of one rank and after a last average of all, and the bytes."""
    draw, held = data
    torch.manual_seed(seed)
    model = TASK.model()
    named = dict(model.named_parameters())
    alone = engines(word, steps, named, ranks)
    copies = ranks if alone else 1  # dense replicas are equal
    stacked = [nn.Parameter(p.detach()[None].repeat(copies, *[1] * p.dim())) for p in named.values()]
    optimizer = TASK.optimizer(stacked, **TASK.options)
    generators = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(ranks)]

    def loss_of(values: tuple[torch.Tensor, ...], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return TASK.loss(functional_call(model, dict(zip(named, values, strict=True)), (x,)), y)

    gradients_of = vmap(grad(loss_of), in_dims=(0, 0, 0), chunk_size=16)
    values = [[p.detach()[r].reshape(-1).numpy() for p in stacked] for r in range(copies)]
    for rank, ahead in enumerate(alone):
        ahead.start(values[rank])
    pool = ThreadPoolExecutor(ranks)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate = TASK.options["lr"] * TASK.rate(step / steps)
        x, y = (torch.stack(part) for part in zip(*(draw(generator) for generator in generators), strict=True))
        if not alone:
            x, y = x.flatten(0, 1)[None], y.flatten(0, 1)[None]
        with sdpa_kernel(SDPBackend.MATH):  # the others have no rule for vmap
            gradients = gradients_of(tuple(p.detach() for p in stacked), x, y)
        norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
        limit = (TASK.clip / (norms + 1e-6)).clamp(max=1.0)
        for p, g in zip(stacked, gradients, strict=True):
            p.grad = g * limit.view(-1, *[1] * (g.dim() - 1))
        optimizer.step()

        def exchange(rank: int, rate: float = rate) -> None:
            own = values[rank]
            used = [p.grad[rank].reshape(-1).numpy() for p in stacked]
            alone[rank].step(own, used, [rate * TASK.options["weight_decay"]] * len(own), own, own)

        if alone:
            list(pool.map(exchange, range(ranks)))
    row = {"setting": word, "seed": seed, "steps": steps, "own_loss": evaluated(model, stacked, held)}
    if alone:
        list(pool.map(lambda rank: alone[rank].average(values[rank]), range(ranks)))
        size = sum(p.numel() for p in named.values())
        row["fewer"] = 4 * size * steps / alone[0].exchange.stats.total.bytes_sent
        row["identical"] = all(bool((p == p[:1]).all()) for p in stacked)
    pool.shutdown()
    for ahead in alone:
        ahead.exchange.close()
    return {**row, "loss": evaluated(model, stacked, held)}


@torch.no_grad()
def evaluated(model: nn.Module, stacked: list[nn.Parameter], held: list[Any]) -> float:
    """Return the mean loss of what is held out, with the parameters of the first rank."""
    for p, values in zip(model.parameters(), stacked, strict=True):
        p.copy_(values[0])
    return sum(TASK.loss(model(x), y).item() for x, y in held) / len(held)


def main() -> None:
    """Train, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, choices=[2, 4, 8, 16, 32, 64])
    parser.add_argument("words", nargs="+")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sequences", type=int, default=64, help="of all ranks in a step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = _text(64, given.sequences // given.ranks)
    report: dict[str, Any] = {"ranks": given.ranks, "sequences": given.sequences, "rows": []}
    if given.json and given.json.exists():
        report = json.loads(given.json.read_text())
    report |= facts("torch", "numpy", "numba")
    for seed in given.seeds:
        for word in given.words:
            since = time.monotonic()
            row = train(word, given.ranks, given.steps, seed, data)
            report["rows"].append(row | {"seconds": round(time.monotonic() - since)})
            print(report["rows"][-1], flush=True)
            if given.json:
                given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

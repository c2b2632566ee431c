"""A small transformer with embeddings reads Python's manual byte by byte: AdamW and ``steps=`` in DDP's hook.

torchrun --standalone --nproc-per-node 2 examples/torchrun_text.py [steps]
"""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgc.torch as dgc

STEPS, BATCH, LENGTH, WIDTH = 300, 16, 64, 64


class Reader(nn.Module):
    """Predicts each next byte of (batch, length) bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        read = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        return self.head(self.layers(read, mask=mask, is_causal=True))


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    model = DistributedDataParallel(Reader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    compression = dgc.Compression.dgc(steps=steps)
    dgc.ddp.register(model, optimizer, compression)

    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=draw)
        window = text[starts + torch.arange(LENGTH + 1)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step in (0, steps - 1):
            print(f"step {step}: loss {loss.item():.3f}, {compression.stats.total.ratio:.0f} times fewer bytes")

    compression.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

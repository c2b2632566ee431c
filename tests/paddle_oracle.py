"""Paddle's DGCMomentum written down naively in NumPy, in Paddle's own form: all ranks in one loop, tensor by tensor."""

from dataclasses import dataclass, field

import numpy as np

F = np.float32


@dataclass
class PaddleOracle:
    """Gradients come unscaled, as Horovod has them; Paddle's are divided by the number of ranks."""

    parameters: list
    ranks: int
    lr: float
    momentum: float
    begin: int
    rampup_step: int = 1
    sparsity: tuple = (0.999,)
    nesterov: bool = False
    clip: float | None = None
    l1: list = field(default_factory=list)
    l2: list = field(default_factory=list)
    min_numel: int = 16384
    masking: bool = True

    def __post_init__(self):
        self.parameters = [p.astype(F).ravel() for p in self.parameters]
        self.u = [[np.zeros_like(p) for p in self.parameters] for _ in range(self.ranks)]
        self.v = [[np.zeros_like(p) for p in self.parameters] for _ in range(self.ranks)]
        self.counter = 0
        count = len(self.parameters)
        self.l1 = self.l1 or [0.0] * count
        self.l2 = self.l2 or [0.0] * count

    def k(self, numel):
        index = int((self.counter - self.begin) * len(self.sparsity) / self.rampup_step)
        ratio = 1 - self.sparsity[min(index, len(self.sparsity) - 1)]
        return max(1, int(round(numel * ratio, 6)))

    def step(self, gradients):
        """gradients[rank][i]"""
        for i, p in enumerate(self.parameters):
            regular = F(self.l1[i]) * np.sign(p) + F(self.l2[i]) * p
            if self.counter < self.begin or p.size < self.min_numel:
                self._dense(i, p, sum(g[i] for g in gradients) / F(self.ranks) + regular)
            else:
                self._sparse(i, p, [g[i] for g in gradients], regular)
        self.counter += 1

    def _dense(self, i, p, g):
        m = F(self.momentum)
        for u in self.u:
            u[i][:] = m * u[i] + g
        update = g + m * self.u[0][i] if self.nesterov else self.u[0][i]
        p -= F(self.lr) * update

    def _sparse(self, i, p, gradients, regular):
        m, total = F(self.momentum), np.zeros_like(p)
        for g, u, v in zip(gradients, self.u, self.v, strict=True):
            if self.counter == self.begin and self.nesterov:
                u[i] *= m
            if self.clip is not None:
                norm = np.linalg.norm(g.astype(np.float64) / self.ranks)
                g = g * F(min(1.0, self.clip * self.ranks**-0.5 / norm))
            full = g + regular
            if self.nesterov:
                u[i][:] = m * (u[i] + full)
                v[i] += u[i] + full
            else:
                u[i][:] = m * u[i] + full
                v[i] += u[i]
            chosen = np.argsort(-np.abs(v[i]), kind="stable")[: self.k(p.size)]
            total[chosen] += v[i][chosen]
            v[i][chosen] = 0
            if self.masking:
                u[i][chosen] = 0
        p -= F(self.lr) * (total / F(self.ranks))

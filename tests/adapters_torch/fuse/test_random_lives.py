"""Random lives of a fused optimizer beside its plain twin: whatever happens between steps, both agree bit by bit."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from adapters_torch.fuse.fuse_tools import Twins, fill_grads, make_params

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.ASGD, {"lr": 0.1, "t0": 3}),
]
SHAPES = [(4,), (3, 4), (1,), (8, 2), (5,), (2, 3, 2, 2), (4, 4), (7,)]


class Life:
    """One random life; every method changes both twins in the same way."""

    def __init__(self, seed: int, twins: Twins) -> None:
        self.random = random.Random(seed)
        self.twins = twins
        self.late = 0

    def both(self):
        return (self.twins.plain_params, self.twins.plain), (self.twins.fused_params, self.twins.fused)

    def some(self) -> tuple[int, ...]:
        count = len(self.twins.plain_params)
        return tuple(i for i in range(count) if self.random.random() < self.random.choice((0.1, 0.5)))

    def clear(self):
        set_to_none = self.random.random() < 0.5
        for _, optimizer in self.both():
            optimizer.zero_grad(set_to_none=set_to_none)

    def backward(self):
        for params, _ in self.both():
            used = [p for p in params if p.requires_grad]
            if used:
                sum((p.float() ** 2).sum() for p in used).backward()

    def replace_some_gradients(self):
        chosen = self.some()
        fill_grads(*(p for p, _ in self.both()), seed=self.random.randrange(100), skip=chosen)

    def freeze(self):
        chosen, value = self.some(), self.random.random() < 0.7
        for params, _ in self.both():
            for i in chosen:
                params[i].requires_grad_(value)

    def reload(self):
        copies = self.random.random() < 0.5
        for _, optimizer in self.both():
            saved = copy.deepcopy(optimizer.state_dict())
            if copies:
                for entries in saved["state"].values():
                    for key, value in entries.items():
                        entries[key] = value.clone() if isinstance(value, torch.Tensor) else value
            optimizer.load_state_dict(saved)

    def forget(self):
        chosen = self.some()
        for params, optimizer in self.both():
            for i in chosen:
                optimizer.state.pop(params[i], None)
        if self.twins.plain.__class__ is torch.optim.Adagrad:
            for params, optimizer in self.both():
                for p in params:
                    if not optimizer.state[p]:
                        optimizer.state[p].update(step=torch.tensor(0.0), sum=torch.zeros_like(p))

    def move_weights(self):
        chosen = self.some()
        for params, _ in self.both():
            for i in chosen:
                params[i].data = params[i].data.clone()

    def turn_weights(self):
        for params, _ in self.both():
            params[6].data = params[6].data.t()
            params[6].grad = None

    def add_group(self):
        if self.late < 2:
            self.late += 1
            for params, optimizer in self.both():
                late = make_params([(3,), (4, 2)], seed=self.late)
                params.extend(late)
                optimizer.add_param_group({"params": late, "lr": 0.03})

    def change_options(self):
        value = self.random.choice((0.01, 0.05))
        for _, optimizer in self.both():
            optimizer.param_groups[0]["lr"] = value

    def live(self, steps: int) -> None:
        events = [self.freeze, self.forget, self.turn_weights, self.add_group, self.change_options]
        events += 2 * [self.reload] + 4 * [self.replace_some_gradients]
        for step in range(steps):
            if step == 3 * steps // 4:  # from here on less and less can be fused
                events.append(self.move_weights)
            if self.random.random() < 0.7:
                self.clear()
            self.backward()
            if self.random.random() < 0.5:
                self.random.choice(events)()
            self.twins.plain.step()
            if self.random.random() < 0.8:
                self.twins.fused.fuse_step()
            else:
                self.twins.fused.step()
            self.twins.assert_equal()


@pytest.mark.filterwarnings("ignore:.*no longer where fuse_optimizer put them:UserWarning")
@pytest.mark.parametrize("case", range(len(OPTIMIZERS)))
@pytest.mark.parametrize("seed", range(5))
def test_random_lives(case, seed):
    cls, options = OPTIMIZERS[case]
    Life(seed, Twins(cls, options, SHAPES)).live(40)

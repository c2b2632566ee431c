"""Which optimizers work on gradients of which 0.1 % is there? ``python benchmarks/sparse_optimizers.py``.

One process, no compressor of this package: a network of two layers learns another one's outputs. Of each gradient plus
what was not sent before, the largest 0.1 % goes to the optimizer. For every optimizer of torch.optim, Keras 3 and
tf_keras: the share of the loss that is left after STEPS steps at a tenth of its usual learning rate, at that, and at
ten times it, with dense and with sparse gradients.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from compress import environment

STEPS, BATCH, DENSITY = 2000, 32, 0.001
SHAPES = (40, 60), (60, 10)
RATES = {"Adadelta": 1.0, "Ftrl": 0.1, "SGD": 0.03, "ASGD": 0.03, "Adagrad": 0.03}
"""In place of defaults with which dense training hardly moves here."""
VARIANTS: dict[str, dict[str, Any]] = {"Adafactor": {"epsilon_1": 1e-12}}
"""Options with which an optimizer of Keras is measured once more."""
LEFT_OUT = {
    "SparseAdam": "takes sparse tensors only",
    "LBFGS": "steps by closures",
    "MultiOptimizer": "several others",
    "LossScaleOptimizer": "wraps another",
    "Optimizer": "the base class",
}

Train = Callable[[float, bool], float]
"""(learning rate, whether gradients are sparse) -> the loss afterwards."""


def problem() -> tuple[np.ndarray, np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Batches (STEPS, BATCH, 40), a test set (500, 40), the teacher's weights and where the student begins."""
    rng = np.random.default_rng(1)
    teacher, student = ([rng.standard_normal(s).astype("f") / math.sqrt(s[0]) for s in SHAPES] for _ in range(2))
    return (
        rng.standard_normal((STEPS, BATCH, 40)).astype("f"),
        rng.standard_normal((500, 40)).astype("f"),
        teacher,
        student,
    )


def entries(shape: tuple[int, ...]) -> int:
    """How many entries of a tensor are sent."""
    return math.ceil(math.prod(shape) * DENSITY)


def begin() -> float:
    """The loss of a student that has learnt nothing."""
    _, x, teacher, student = problem()
    wanted, given = (np.tanh(x @ a) @ b for a, b in (teacher, student))
    return float(np.square(wanted - given).mean())


def of_torch() -> Iterator[tuple[str, float, Train]]:
    """(name, usual learning rate, training) of each optimizer of torch."""
    import torch

    torch.set_num_threads(1)
    batches, test, teacher, start = (torch.as_tensor(v) if isinstance(v, np.ndarray) else v for v in problem())
    target = [torch.as_tensor(w) for w in teacher]

    def loss_of(weights: list[Any], x: Any) -> Any:
        wanted, given = (torch.tanh(x @ a) @ b for a, b in (target, weights))
        return (wanted - given).square().mean()

    def trainer(cls: Any) -> Train:
        def train(rate: float, sparse: bool) -> float:
            weights = [torch.tensor(w, requires_grad=True) for w in start]
            optimizer, residuals = cls(weights, lr=rate), [torch.zeros_like(w) for w in weights]
            for x in batches:
                for w, v, g in zip(weights, residuals, torch.autograd.grad(loss_of(weights, x), weights), strict=True):
                    w.grad = g
                    if sparse:
                        v += g
                        threshold = v.abs().flatten().topk(entries(v.shape)).values[-1]
                        w.grad = torch.where(v.abs() >= threshold, v, torch.zeros_like(v))
                        v -= w.grad
                optimizer.step()
            return loss_of(weights, test).item()

        return train

    for name, cls in sorted(vars(torch.optim).items()):
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in LEFT_OUT:
            yield name, RATES.get(name) or inspect.signature(cls).parameters["lr"].default, trainer(cls)


def of_keras(module: Any, base: Any, **options: Any) -> Iterator[tuple[str, float, Train]]:
    """(name, usual learning rate, training) of each optimizer in ``module``, which has the base class ``base``."""
    import tensorflow as tf

    batches, test, teacher, start = problem()
    data = tf.constant(batches)

    def loss_of(weights: list[Any], x: Any) -> Any:
        wanted, given = (tf.tanh(x @ a) @ b for a, b in (teacher, weights))
        return tf.reduce_mean(tf.square(wanted - given))

    def trainer(cls: Any, **own: Any) -> Train:
        variables = [options.get("variable", tf.Variable)(w, name=f"w{i}") for i, w in enumerate(start)]
        weights = [getattr(v, "_value", v) for v in variables]
        residuals = [tf.Variable(np.zeros_like(w)) for w in start]
        optimizer = cls(learning_rate=0.1, **own)
        if hasattr(optimizer, "build"):
            optimizer.build(variables)
        else:
            optimizer._create_all_weights(variables)
        listed = optimizer.variables
        state = [getattr(v, "_value", v) for v in (listed() if callable(listed) else listed)]
        state += [*weights, *residuals]
        begin = [v.numpy() for v in state]

        @tf.function
        def run(sparse: Any) -> None:
            for x in data:
                with tf.GradientTape() as tape:
                    loss = loss_of(weights, x)
                sent = []
                for v, g in zip(residuals, tape.gradient(loss, weights), strict=True):
                    v.assign_add(g)
                    threshold = tf.math.top_k(tf.reshape(tf.abs(v), [-1]), entries(v.shape)).values[-1]
                    sent.append(tf.where(tf.abs(v) >= tf.where(sparse, threshold, 0.0), v, 0.0))
                    v.assign_sub(sent[-1])
                optimizer.apply_gradients(zip(sent, variables, strict=True))

        def train(rate: float, sparse: bool) -> float:
            for variable, value in zip(state, begin, strict=True):
                variable.assign(value)
            optimizer.learning_rate = rate
            run(tf.constant(sparse))
            return float(loss_of(weights, tf.constant(test)))

        return train

    for name, cls in sorted(vars(module).items()):
        if isinstance(cls, type) and issubclass(cls, base) and name not in LEFT_OUT:
            rate = RATES.get(name) or inspect.signature(cls).parameters["learning_rate"].default
            yield name, rate, trainer(cls)
            if name in VARIANTS:
                given = ", ".join(f"{key}={value:g}" for key, value in VARIANTS[name].items())
                yield f"{name}({given})", rate, trainer(cls, **VARIANTS[name])


def optimizers(library: str) -> Iterator[tuple[str, float, Train]]:
    """Those of one library."""
    if library == "torch.optim":
        return of_torch()
    if library == "Keras 3":
        import keras

        return of_keras(keras.optimizers, keras.optimizers.Optimizer, variable=keras.Variable)
    import tf_keras

    return of_keras(tf_keras.optimizers, tf_keras.optimizers.Optimizer)


def _share(loss: float) -> float | None:
    """Of the loss at the beginning; None where it is not finite, which JSON does not know."""
    return float(f"{loss / begin():.3g}") if math.isfinite(loss) else None


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    libraries = ["torch.optim", "Keras 3", "tf_keras"]
    parser.add_argument("--libraries", nargs="+", default=libraries, choices=libraries)
    parser.add_argument("--only", nargs="+", help="names of optimizers")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    rows: dict[str, Any] = {}
    for library in options.libraries:
        for name, usual, train in optimizers(library):
            if options.only and name not in options.only:
                continue
            rates = [usual / 10, usual, usual * 10]
            row: dict[str, list[float | None]] = {"rates": [float(f"{rate:g}") for rate in rates]}
            rows[f"{library}: {name}"] = row
            for kind in ("dense", "sparse"):
                row[kind] = [_share(train(rate, kind == "sparse")) for rate in rates]
            print(f"{library}: {name}", json.dumps(row), flush=True)
    if options.json:
        head = {"steps": STEPS, "density": DENSITY, "environment": environment()}
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        text = json.dumps(head, indent=1).removesuffix("\n}")
        options.json.write_text(f'{text},\n "loss_left": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    main()

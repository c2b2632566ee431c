"""Which variables a saved optimizer of Keras 3 holds, in which order, and what becomes of those that ours has not.

An optimizer that applies its momentum and adds up its passes itself, in one process or in a dense run, has variables
for both; on several ranks the compressor and the wrapper do, and it has none. Saved models of one kind are loaded into
the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from dgc.tensorflow.engine.optimizers import Optimizer, is_sgd, make_slots
from dgc.tensorflow.engine.tensors import Variable

_Place = tuple[tuple[int, ...], Any]
"""A saved variable's shape, and the variable that takes its value; None where there is none."""


def load_variables(inner: Optimizer, own: Sequence[Any], store: Mapping[str, Any], momentum_is_taken: bool) -> bool:
    """Give a distributed optimizer the values that were saved by one process, by several or by a dense run.

    What is not saved of momentum and of added gradients begins at 0; momentum that was saved as slots gets slots, of
    which the compressor makes its buffer in the first step.

    Args:
        inner: the user's optimizer, built.
        own: the wrapper's variables beside those of ``inner``; a dense run has saved none.
        store: "0", "1", ... -> values.
        momentum_is_taken: whether the compressor has adopted the momentum of ``inner``.

    Returns:
        False where what was saved has none of these forms; nothing is changed then.
    """
    shapes = [tuple(store[str(i)].shape) for i in range(len(store.keys()))]
    slots_may_be = is_sgd(inner) and (momentum_is_taken or bool(getattr(inner, "momentums", None)))
    # Slots before sums, which have the same shapes: sums of an optimizer with momentum are not saved without slots.
    choices = itertools.product((True, False), _choices(slots_may_be), _choices(inner.gradient_accumulation_steps))
    for with_own, with_slots, with_sums in choices:
        wanted = [*(_places(own) if with_own else ()), *_layout(inner, with_sums, with_slots)]
        if [shape for shape, _ in wanted] == shapes:
            break
    else:
        return False
    if with_slots:
        make_slots(inner)
        wanted = [*(_places(own) if with_own else ()), *_layout(inner, with_sums, with_slots)]
    for variable in (*_sums(inner), *_slots(inner)):
        variable.assign(tf.zeros(variable.shape, variable.dtype))
    for i, (_, variable) in enumerate(wanted):
        if variable is not None:
            variable.assign(store[str(i)])
    return True


def loaded_with_the_wrapper(store: Mapping[str, Any]) -> None:
    """In place of the user's optimizer's ``load_own_variables``: the wrapper has loaded its variables already."""


def _choices(possible: Any) -> tuple[bool, ...]:
    return (True, False) if possible else (False,)


def _places(variables: Sequence[Variable]) -> list[_Place]:
    return [(tuple(v.shape), v) for v in variables]


def _sums(inner: Optimizer) -> list[Any]:
    return list(getattr(inner, "_accumulated_gradients", None) or [])


def _slots(inner: Optimizer) -> list[Any]:
    return list(getattr(inner, "momentums", None) or []) if is_sgd(inner) else []


def _layout(inner: Optimizer, with_sums: bool, with_slots: bool) -> list[_Place]:
    """Keras' order: counters, moving averages, sums of gradients, all else."""
    trained = [(tuple(v.shape), None) for v in inner._trainable_variables]
    apart = {id(v) for v in (*_sums(inner), *_slots(inner))}
    others = _places([v for v in inner.variables if id(v) not in apart])
    # A schedule is no variable.
    first = 1 + hasattr(inner._learning_rate, "assign") + (len(trained) if inner.use_ema else 0)
    sums: list[_Place] = (_places(_sums(inner)) or trained) if with_sums else []
    slots: list[_Place] = (_places(_slots(inner)) or trained) if with_slots else []
    return [*others[:first], *sums, *others[first:], *slots]

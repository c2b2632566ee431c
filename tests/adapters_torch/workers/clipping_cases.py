"""On 2 real ranks: ``clip_grad_norm_()`` between ``synchronize()`` and ``step()``."""

import warnings

import horovod.torch as hvd
import torch
from models import EXACT, loss_of, make_model, run_steps, sgd, worst_difference, wrap
from worker_tools import case

OPTIMIZERS = {
    "SGD": (lambda m: sgd(m, momentum=0.0), 1e-5),
    "Adam": (lambda m: torch.optim.Adam(m.parameters(), lr=0.01), 1e-3),  # divides by small numbers
}
KINDS = {"plain": {}, "accumulated": {"passes": 2}, "scaled": {"scale": "finite"}}


@case(way="ab", optimizer=OPTIMIZERS, kind=KINDS)
def clipping_equals_dense_training_where_the_optimizer_has_its_own_momentum_or_none(way, optimizer, kind):
    make, bound = OPTIMIZERS[optimizer]
    expected, _ = run_steps("dense", make, "clip, no skip", **KINDS[kind])
    for update in ("clip, no skip", "clip twice"):
        model, compression = run_steps(way, make, update, **KINDS[kind], **EXACT)
        assert worst_difference(model, expected) <= bound, update
        compression.close()


@case(way="ab")
def a_limit_that_is_not_reached_equals_dense_training_with_momentum(way):
    """With adopted momentum an exchange returns a velocity, which a second exchange would make a gradient again."""
    options = {"limit": 1e9}
    expected, _ = run_steps("dense", sgd, "clip", **options)
    model, _ = run_steps(way, sgd, "clip", **options, **EXACT)
    assert worst_difference(model, expected) <= 1e-5


VELOCITIES = {"clipped": ({}, 0.01, 1), "limit not reached": ({}, 1e9, 0), "gradients": ({"momentum": 0.0}, 0.01, 0)}


@case(way="ab", kind=VELOCITIES)
def clipping_a_velocity_is_one_warning_of_rank_0_in_the_first_step(way, kind):
    options, limit, expected = VELOCITIES[kind]
    model = make_model()
    optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9, **options)
    said = []
    for step in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            with optimizer.skip_synchronize():
                optimizer.step()
        said += [step for w in caught if "clipped or changed" in str(w.message)]
    assert said == [0] * (expected if hvd.rank() == 0 else 0), said

"""On 2 real ranks: ``clip_grad_norm_()`` between ``synchronize()`` and ``step()``."""

import torch
from models import EXACT, run_steps, sgd, worst_difference
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

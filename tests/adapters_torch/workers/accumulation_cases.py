"""On 2 real ranks: gradients of several backward passes are added up before they are exchanged."""

from models import EXACT, dense_backward, distribute, loss_of, make_model, sgd, train, worst_difference, wrap
from worker_tools import case


def require_dense_equality(way, passes_of_steps, early_steps):
    """Add up 2 passes to a step. Where there are fewer, ``early_steps`` says whether a step follows all the same."""
    model, expected = make_model(), make_model()
    plain = sgd(expected)
    optimizer, _ = wrap(way, model, sgd(model), hvd_options={"backward_passes_per_step": 2}, **EXACT)
    for step, passes in enumerate(passes_of_steps):
        optimizer.zero_grad()
        plain.zero_grad()
        for i in range(passes):
            loss_of(model, 10 * step + i).backward()
            dense_backward(expected, 10 * step + i)
        if passes == 2 or early_steps:
            optimizer.step()
            plain.step()
    assert worst_difference(model, expected) <= 1e-5


@case(way="ab")
def accumulation_equals_dense_training_also_where_a_step_comes_early(way):
    require_dense_equality(way, (2, 2, 1, 2), early_steps=True)


@case
def zero_grad_drops_the_passes_of_an_accumulation_that_ends_early():
    """As at the end of an epoch."""
    require_dense_equality("b", (2, 1, 2, 1, 1, 2), early_steps=False)


@case
def backward_passes_per_step_may_be_set_as_an_attribute():
    """Horovod reads it when a step is exchanged."""
    models = []
    for kind, options in (("dense", {}), ("b", EXACT)):
        model = make_model()
        optimizer, _ = distribute(kind, model, sgd(model), **options)
        optimizer.backward_passes_per_step = 2
        train(optimizer, model, 1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, 10 + step).backward()
            loss_of(model, 20 + step).backward()
            optimizer.step()
        models.append(model)
    assert worst_difference(*models) <= 1e-5

"""On 2 real ranks: gradients of several backward passes are added up before they are exchanged."""

import horovod.torch as hvd
from models import EXACT, dense_backward, loss_of, make_model, sgd, train, worst_difference, wrap
from worker_tools import case


@case(way="ab")
def accumulation_equals_dense_training_also_where_a_step_comes_early(way):
    model, expected = make_model(), make_model()
    plain = sgd(expected)
    optimizer, _ = wrap(way, model, sgd(model), hvd_options={"backward_passes_per_step": 2}, **EXACT)
    step = 0
    for passes in (2, 2, 1, 2):
        optimizer.zero_grad()
        plain.zero_grad()
        for _ in range(passes):
            loss_of(model, step).backward()
            dense_backward(expected, step)
            step += 1
        optimizer.step()
        plain.step()
    assert worst_difference(model, expected) <= 1e-5


@case
def zero_grad_drops_the_passes_of_an_accumulation_that_ends_early():
    """As at the end of an epoch."""
    model, expected = make_model(), make_model()
    plain = sgd(expected)
    optimizer, _ = wrap("b", model, sgd(model), hvd_options={"backward_passes_per_step": 2}, **EXACT)
    for step, passes in enumerate((2, 1, 2, 1, 1, 2)):
        optimizer.zero_grad()
        plain.zero_grad()
        for i in range(passes):
            loss_of(model, 10 * step + i).backward()
            dense_backward(expected, 10 * step + i)
        if passes == 2:
            optimizer.step()
            plain.step()
    assert worst_difference(model, expected) <= 1e-5


@case
def backward_passes_per_step_may_be_set_as_an_attribute():
    """Horovod reads it when a step is exchanged."""
    models = []
    for is_dense in (True, False):
        model = make_model()
        if is_dense:
            optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
        else:
            optimizer, _ = wrap("b", model, sgd(model), **EXACT)
        optimizer.backward_passes_per_step = 2
        train(optimizer, model, 1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, 10 + step).backward()
            loss_of(model, 20 + step).backward()
            optimizer.step()
        models.append(model)
    assert worst_difference(*models) <= 1e-5

"""Which memory is moved, which is shared, and which is never touched."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest
import torch
from adapters_torch.fuse.fuse_tools import Twins, fill_grads, fused_counts, make_params

from dgc.torch.fuse import fuse_optimizer


def storages(params) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in params}


def in_buffer(buffer: torch.Tensor, pieces) -> list[torch.nn.Parameter]:
    """Parameters (and gradients of one) on pieces (begin, end) of a flat buffer."""
    made = [torch.nn.Parameter(buffer[a:b]) for a, b in pieces]
    grads = torch.ones_like(buffer)
    for p, (a, b) in zip(made, pieces, strict=True):
        p.grad = grads[a:b]
    return made


def stepped(params, **options) -> tuple[int, int]:
    """What was fused in a step of SGD with a rate of 1."""
    optimizer = fuse_optimizer(torch.optim.SGD(params, lr=1.0), **options)
    optimizer.fuse_step()
    return fused_counts(optimizer)


def beside(memory: torch.Tensor) -> list[torch.Tensor]:
    """The halves of a memory as two storages that touch, as an allocator may well place them."""
    raw = (ctypes.c_float * 16).from_address(memory.data_ptr())
    return [torch.frombuffer(raw, dtype=torch.float32, count=8, offset=offset) for offset in (0, 32)]


def halves(buffer: torch.Tensor, grads, shape=(4,)) -> list[torch.nn.Parameter]:
    """Two parameters on one buffer, with the gradients given."""
    made = [torch.nn.Parameter(half.view(shape)) for half in buffer.chunk(2)]
    for p, grad in zip(made, grads, strict=True):
        p.grad = grad
    return made


def test_flattening_moves_data_and_keeps_values_parameters_and_shapes():
    params = make_params()
    before = [(id(p), p.detach().clone(), p.shape, p.stride()) for p in params]
    optimizer = torch.optim.SGD(params, lr=0.1)
    assert fuse_optimizer(optimizer) is optimizer
    assert len(storages(params)) == 1
    for p, (identity, value, shape, stride) in zip(params, before, strict=True):
        assert (id(p), p.shape, p.stride()) == (identity, shape, stride)
        assert torch.equal(p, value)
        assert p.grad is None


def test_weights_are_as_aligned_as_their_size_allows():
    params = make_params([(3,), (16, 4), (5,), (2,), (8, 16), (4,), (1,)])
    fuse_optimizer(torch.optim.SGD(params, lr=0.1))
    for p in params:
        size = p.numel() * p.itemsize
        assert p.data_ptr() % min(size & -size, 64) == 0


def test_without_flattening_neither_weights_nor_gradients_move():
    params = make_params()
    places = [p.data_ptr() for p in params]
    optimizer = fuse_optimizer(torch.optim.SGD(params, lr=0.1, momentum=0.9), do_flatten=False)
    fill_grads(params, seed=0)
    grads = [p.grad.data_ptr() for p in params]
    optimizer.fuse_step()
    assert [p.data_ptr() for p in params] == places
    assert [p.grad.data_ptr() for p in params] == grads
    assert fused_counts(optimizer) == (0, 0)


@pytest.mark.parametrize("do_flatten", [True, False])
def test_views_that_begin_inside_a_buffer_are_fused_at_their_place(do_flatten):
    buffer = torch.zeros(20)
    assert stepped(in_buffer(buffer, [(4, 6), (6, 9), (9, 12)]), do_flatten=do_flatten) == (1, 3)
    assert buffer.tolist() == [0.0] * 4 + [-1.0] * 8 + [0.0] * 8


def test_a_gap_between_views_is_never_written():
    buffer = torch.zeros(12)
    assert stepped(in_buffer(buffer, [(0, 2), (2, 4), (5, 7), (7, 9)])) == (2, 4)
    assert buffer.tolist() == [-1.0] * 4 + [0.0] + [-1.0] * 4 + [0.0] * 3


def test_neighbouring_allocations_are_not_one_buffer():
    memory = torch.zeros(16)
    params = [torch.nn.Parameter(half) for half in beside(memory)]
    assert params[0].data_ptr() + 32 == params[1].data_ptr()
    assert len(storages(params)) == 2
    for p in params:
        p.grad = torch.ones(8)
    assert stepped(params, do_flatten=False) == (0, 0)
    assert memory.tolist() == [-1.0] * 16


NUMBERS = torch.arange(20.0)
NOT_FLAT = {
    "a gap": ([NUMBERS[:4], NUMBERS[6:10]], (4,), [0, 1, 2, 3, 6, 7, 8, 9]),
    "another order": ([NUMBERS[4:8], NUMBERS[:4]], (4,), [4, 5, 6, 7, 0, 1, 2, 3]),
    "another order of elements": (
        [NUMBERS[:4].view(2, 2).t(), NUMBERS[4:8].view(2, 2).t()],
        (2, 2),
        [0, 2, 1, 3, 4, 6, 5, 7],
    ),
}


@pytest.mark.parametrize("do_flatten", [True, False])
@pytest.mark.parametrize("case", NOT_FLAT)
def test_gradients_that_do_not_lie_as_the_weights_do_are_not_taken_for_flat(case, do_flatten):
    buffer = torch.zeros(8)
    grads, shape, moved = NOT_FLAT[case]
    assert stepped(halves(buffer, grads, shape), do_flatten=do_flatten) == ((1, 2) if do_flatten else (0, 0))
    assert buffer.tolist() == [-number for number in moved]
    assert NUMBERS.tolist() == list(range(20))


def test_neighbouring_allocations_are_not_one_gradient():
    buffer, memory = torch.zeros(16), torch.ones(16)
    assert stepped(halves(buffer, beside(memory), (8,)), do_flatten=False) == (0, 0)
    assert buffer.tolist() == [-1.0] * 16


def test_lazily_conjugated_gradients_are_not_taken_as_they_lie():
    buffer, grads = torch.zeros(8, dtype=torch.complex64), torch.arange(8) * (1 + 1j)
    stepped(halves(buffer, grads.conj().chunk(2)))
    assert torch.equal(buffer, -grads.conj())


def swap(params):
    params[0].grad, params[1].grad = params[1].grad, params[0].grad


def share(params):
    params[0].grad = params[1].grad


def turn(params):
    params[0].grad = params[0].grad.t()


def turn_weights(params):
    # Square: the shape does not tell, only the strides do.
    params[0].data, params[0].grad = params[0].data.t(), params[0].grad.clone()


@pytest.mark.parametrize("change", [swap, share, turn, turn_weights])
def test_gradients_and_weights_that_are_changed_between_steps_are_followed(change):
    twins = Twins(torch.optim.SGD, {"lr": 0.1}, shapes=[(4, 4), (4, 4), (3,)])
    twins.step()
    for params, step in twins.steps:
        change(params)
        step()
    twins.assert_equal()
    twins.run(2)


def conv_params():
    made = make_params([(8, 3, 3, 3), (8,), (4, 8, 3, 3), (4,), (5, 6)])
    for i in (0, 2):
        made[i] = torch.nn.Parameter(made[i].detach().to(memory_format=torch.channels_last))
    made[4] = torch.nn.Parameter(made[4].detach().t())
    return made


@pytest.mark.parametrize("options", [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.01}])
def test_memory_formats_are_kept(options):
    twins = Twins(torch.optim.SGD if "momentum" in options else torch.optim.Adam, options, make=conv_params)
    for step in range(6):
        twins.run(fuse=step != 3)
    assert fused_counts(twins.fused) == (1, 5)
    for plain, fused in zip(twins.plain_params, twins.fused_params, strict=True):
        assert plain.stride() == fused.stride()
        for key, value in twins.plain.state[plain].items():
            assert twins.fused.state[fused][key].stride() == value.stride()


def test_a_gradient_in_another_memory_format_is_read_by_position():
    twins = Twins(torch.optim.SGD, {"lr": 0.1}, make=conv_params)
    for params in (twins.plain_params, twins.fused_params):
        fill_grads(params, seed=1)
        for p in params:
            p.grad = p.grad.contiguous()
    twins.plain.step()
    twins.fused.fuse_step()
    twins.assert_equal()
    assert fused_counts(twins.fused) == (1, 5)


def test_parameters_on_the_same_memory_stay_together():
    def tied():
        memory = torch.ones(6)
        return [*make_params([(3,), (2, 2)]), torch.nn.Parameter(memory), torch.nn.Parameter(memory.view(2, 3))]

    twins = Twins(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, make=tied)
    twins.run(3)
    assert twins.fused_params[2].data_ptr() == twins.fused_params[3].data_ptr()
    assert fused_counts(twins.fused) == (1, 2)


def test_overlapping_views_are_stepped_in_the_order_of_the_group():
    def overlapping():
        buffer = torch.ones(12)
        return [torch.nn.Parameter(buffer[a:b]) for a, b in ((2, 6), (0, 4), (6, 8), (8, 12))]

    twins = Twins(torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.3}, make=overlapping)
    twins.run(3, counts=(1, 2))


def test_memory_shared_with_other_processes_stays_where_it_is():
    params = make_params([(4,), (5,), (6,), (7,)])
    params[1].share_memory_()
    place = params[1].data_ptr()
    optimizer = fuse_optimizer(torch.optim.SGD(params, lr=0.1))
    fill_grads(params, seed=0)
    optimizer.fuse_step()
    assert params[1].data_ptr() == place
    assert params[1].is_shared()
    assert fused_counts(optimizer) == (1, 3)


@pytest.mark.parametrize("pieces", [[(0, 4), (10, 14)], [(10, 14)]])
def test_views_of_a_larger_buffer_are_not_taken_out_of_it(pieces):
    buffer = torch.zeros(30)
    views = [torch.nn.Parameter(buffer[a:b]) for a, b in pieces]
    params = [*views, *make_params([(3,), (5,)])]
    optimizer = fuse_optimizer(torch.optim.SGD(params, lr=0.1))
    assert storages(views) == {buffer.untyped_storage().data_ptr()}
    fill_grads(params, seed=0)
    optimizer.fuse_step()
    for view, (a, b) in zip(views, pieces, strict=True):
        assert torch.equal(buffer[a:b], view)
        assert view.any()
    assert fused_counts(optimizer) == (1, 2)


def odd_params():
    gapped = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))[:, ::2]
    scalars = [torch.nn.Parameter(torch.tensor(value)) for value in (0.5, -1.5)]
    empty = torch.nn.Parameter(torch.empty(0, 3))
    return [*make_params([(3,)]), scalars[0], torch.nn.Parameter(gapped), empty, *make_params([(4, 2)]), scalars[1]]


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam])
def test_scalars_gapped_and_empty_parameters_are_stepped_alone(cls):
    twins = Twins(cls, {"lr": 0.1}, make=odd_params)
    twins.run(4, counts=(1, 2))


def test_tensor_subclasses_are_stepped_alone():
    class Tagged(torch.nn.Parameter):
        pass

    def tagged():
        made = make_params([(3,), (4,), (5,)])
        made[1] = Tagged(made[1].detach())
        return made

    twins = Twins(torch.optim.SGD, {"lr": 0.1}, make=tagged)
    twins.run(counts=(1, 2))


def test_weights_that_left_their_place_are_warned_of_and_updated_alone():
    twins = Twins(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    twins.step()
    for params in (twins.plain_params, twins.fused_params):
        params[2].data = params[2].data.clone()
    with pytest.warns(UserWarning, match=r"1 of 7 flattened parameters are no longer"):
        twins.run()
    twins.run()
    assert fused_counts(twins.fused)[1] in (5, 6)  # its neighbours may be cut off from the rest


def test_a_model_moved_to_another_type_is_updated_right():
    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))

    plain, fused = model(), model()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    fused_optimizer = fuse_optimizer(torch.optim.SGD(fused.parameters(), lr=0.1))
    plain.double()
    fused.double()
    for net, step in ((plain, plain_optimizer.step), (fused, fused_optimizer.fuse_step)):
        net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        if net is fused:
            with pytest.warns(UserWarning, match="4 of 4 flattened parameters"):
                step()
        else:
            step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fused.parameters(), strict=True))


@pytest.mark.parametrize("options", [{"check_flatten": False}, {"do_flatten": False}])
def test_no_warning_unless_flatness_is_checked(options, recwarn):
    twins = Twins(torch.optim.SGD, {"lr": 0.1}, **options)
    twins.step()
    twins.fused_params[2].data = twins.fused_params[2].data.clone()
    twins.run()
    assert not recwarn.list


def test_a_second_optimizer_on_the_same_parameters_finds_them_flat():
    params = make_params()
    fuse_optimizer(torch.optim.SGD(params, lr=0.1))
    places = [p.data_ptr() for p in params]
    second = fuse_optimizer(torch.optim.SGD(params, lr=0.1))
    assert [p.data_ptr() for p in params] == places
    fill_grads(params, seed=0)
    second.fuse_step()
    assert fused_counts(second) == (1, len(params))


def test_a_dropped_optimizer_is_freed_at_once():
    gc.disable()
    try:
        params = make_params()
        optimizer = fuse_optimizer(torch.optim.Adam(params, lr=0.1))
        fill_grads(params, seed=0)
        optimizer.fuse_step()
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()

"""On real ranks: parameters that differ although no step failed; torch's ZeroRedundancyOptimizer is the yardstick."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import warnings
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from worker_tools import case, run_cases
from zero_tools import (
    assert_bits_equal,
    assert_replicas_identical,
    make_model,
    parameters_of_sizes,
    raises,
    set_mean_gradients,
    twin,
)

from dgc.errors import LayoutError
from dgc.torch.zero import ZeroRedundancyOptimizer as Zero

SIZES = (3000, 2900, 2800, 2700, 2600)
SGD = (torch.optim.SGD, {"lr": 0.1})
ADAM = (torch.optim.Adam, {"lr": 0.01})


@contextlib.contextmanager
def torch_process_group():
    """The same ranks as torch's gloo group."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = hvd.broadcast_object(str(Path(folder) / "meeting"), name="meeting")
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=hvd.rank(), world_size=hvd.size())
        try:
            yield
        finally:
            dist.destroy_process_group()
            hvd.barrier()


@contextlib.contextmanager
def warned(times: int, where: str = __file__):
    """So many warnings of different parameters, on every rank, that point at a line of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(w.message) for w in caught if "ranks held different parameters" in str(w.message)]
    assert len(messages) == times, messages
    assert all("hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in m for m in messages)
    assert all(w.filename == where for w in caught), [w.filename for w in caught]


def own_parameters(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(n, generator=generator)) for n in SIZES]


def step_all(first: int, count: int, *both, density: float = 0.002) -> None:
    for step in range(first, first + count):
        for optimizer, parameters in both:
            optimizer.zero_grad()
            set_mean_gradients(parameters, step, density=density)
            optimizer.step()


def _sharded(kind=SGD, **options):
    own = parameters_of_sizes(*SIZES)
    return own, Zero(own, kind[0], **kind[1], **options)


def _last_bytes(zero) -> int:
    return zero.stats.last.bytes_sent


@case
def different_starts_end_as_with_torchs_optimizer():
    with torch_process_group():
        for (cls, options), views, frozen in itertools.product((SGD, ADAM), (False, True), (False, True)):
            own = own_parameters(seed=hvd.rank())
            own[3].requires_grad_(not frozen)
            other = twin(own)
            zero = Zero(own, cls, parameters_as_bucket_view=views, **options)
            torchs = TorchZero(other, cls, **options)
            with warned(1):
                step_all(0, 4, (zero, own), (torchs, other))
            assert_replicas_identical(own)
            assert_bits_equal(own, other)


@case
def equal_starts_cost_no_warning():
    own, zero = _sharded()
    plain = twin(own)
    other = torch.optim.SGD(plain, lr=0.1)
    with warned(0):
        for step in range(8):
            step_all(step, 1, (zero, own), (other, plain), density=0.0)
            assert _last_bytes(zero) == 36
    assert_bits_equal(own, plain)


def _writes():
    """What a user does to the first two parameters between two steps."""
    other = own_parameters(seed=99)

    def load(parameters):
        holder, source = nn.ParameterList(parameters[:2]), nn.ParameterList(other[:2])
        holder.load_state_dict(source.state_dict())

    def limit(parameters):
        with torch.no_grad():
            for p in parameters[:2]:
                p.clamp_(-0.5, 0.5)

    def replace(parameters):
        for p, q in zip(parameters[:2], other, strict=False):
            p.data = q.detach().clone()

    return load, limit, replace


@case
def what_some_ranks_change_between_two_steps_ends_as_with_torchs_optimizer():
    with torch_process_group():
        for write, changing, views in itertools.product(_writes(), (0, hvd.size() - 1), (False, True)):
            own, zero = _sharded(parameters_as_bucket_view=views)
            other = twin(own)
            torchs = TorchZero(other, torch.optim.SGD, lr=0.1)
            step_all(0, 3, (zero, own), (torchs, other))
            if hvd.rank() == changing:
                write(own)
                write(other)
            with warned(1):
                step_all(3, 1, (zero, own), (torchs, other))
            assert_replicas_identical(own)
            assert_bits_equal(own, other)
            with warned(0):
                step_all(5, 1, (zero, own), (torchs, other))
            assert _last_bytes(zero) < 0.1 * zero.stats.last.dense_bytes
            assert_bits_equal(own, other)


@case
def a_frozen_parameter_that_one_rank_changes_is_its_owners_again():
    for kind in (SGD, ADAM):
        own, zero = _sharded(kind)
        own[0].requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step_all(0, 2, (zero, own), density=1.0)
        if hvd.rank() == 1:
            with torch.no_grad():
                own[0].add_(1)
        with warned(1):
            step_all(2, 1, (zero, own), density=1.0)
        assert_replicas_identical(own)


@case
def a_write_through_data_is_found():
    own, zero = _sharded()
    step_all(0, 3, (zero, own))
    if hvd.rank() == 1:
        for p in own:
            p.data.add_(1)
    with warned(1):
        step_all(3, 1, (zero, own))
    assert_replicas_identical(own)


@case
def writes_between_all_steps_on_all_ranks_send_nothing_whole():
    """All ranks limit the weights, as some adversarial training does."""
    own, zero = _sharded()
    with warned(0):
        for step in range(5):
            step_all(step, 1, (zero, own), density=0.0)
            with torch.no_grad():
                for p in own:
                    p.clamp_(-1, 1)
            assert _last_bytes(zero) == 36
    assert_replicas_identical(own)


@case
def groups_added_with_different_values_become_the_owners():
    own, zero = _sharded()
    step_all(0, 3, (zero, own))
    late = own_parameters(seed=hvd.rank())[:2]
    zero.add_param_group({"params": late})
    with warned(1):
        step_all(3, 1, (zero, own + late))
    assert_replicas_identical(own + late)


@case
def different_starts_under_horovods_optimizer():
    for density in (1.0, 0.0):
        model = make_model(seed=hvd.rank())
        own = list(model.parameters())
        zero = hvd.DistributedOptimizer(Zero(own, torch.optim.Adam, lr=0.01), model.named_parameters())
        with warned(1, where=hvd.optimizer.__file__):
            for step in range(2):
                zero.zero_grad()
                torch.manual_seed(10 * step + hvd.rank())
                (density * model(torch.randn(4, 7)).square().mean()).backward()
                zero.step()
        assert_replicas_identical(own)


@case
def a_failed_step_is_not_taken_for_different_starts():
    own, zero = _sharded()

    def fail():
        if hvd.rank() == 1:
            raise KeyError("no more data")

    with contextlib.suppress(Exception):
        zero.step(fail)
    with warned(0):
        step_all(0, 3, (zero, own))
    assert_replicas_identical(own)


@case
def a_state_loaded_on_some_ranks_only_is_an_error_everywhere():
    own, zero = _sharded(ADAM)
    step_all(0, 2, (zero, own))
    plain = torch.optim.Adam(twin(own), **ADAM[1])
    step_all(0, 2, (plain, plain.param_groups[0]["params"]))
    saved = plain.state_dict()
    if hvd.rank() == 0:
        zero.load_state_dict(saved)
    raises(LayoutError, "'state loaded since the last step' is true on rank 0.*load a state on every rank", zero.step)
    zero.load_state_dict(saved)
    step_all(2, 2, (zero, own))
    assert_replicas_identical(own)


if __name__ == "__main__":
    run_cases()

"""What else runs in a training script beside the exchange, on 2 real ranks: the result is that of dense training."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import threading
import time
import warnings

import horovod.torch as hvd
import torch
from horovod_holds import every_tensor_is_held
from models import dense_reference, each_way, loss_of, make_model, on_every_rank, sgd, train, worst_difference, wrap
from torch import nn
from worker_tools import OPENED, case, run_cases

import dgc.torch as dgc

EXACT = {"sparsity": 0.0, "momentum_masking": False}


class Batches(torch.utils.data.Dataset):
    """The batches of one rank, made in a worker process."""

    def __init__(self, steps):
        self.steps = steps

    def __len__(self):
        return self.steps

    def __getitem__(self, step):
        generator = torch.Generator().manual_seed(1000 * step + int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
        return torch.randn(8, 20, generator=generator), torch.randint(0, 10, (8,), generator=generator)


class Embeddings(nn.Module):
    """Positions and kinds are added as views: autograd gives both the same memory as their gradient."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.position = nn.Parameter(torch.randn(300, 500, generator=generator))
        self.kind = nn.Parameter(torch.randn(300, 500, generator=generator))

    def loss(self, step, rank):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(300, 500, generator=generator)
        return (x * (self.position.unsqueeze(0) + self.kind.unsqueeze(0)).tanh()).mean() * 1000


@case
def gradients_that_share_memory_are_exchanged_apart():
    dense = Embeddings()
    plain = torch.optim.SGD(dense.parameters(), lr=0.5, momentum=0.9)
    for step in range(8):
        plain.zero_grad()
        (sum(dense.loss(step, rank) for rank in range(hvd.size())) / hvd.size()).backward()
        plain.step()
    for way in "ab":
        model = Embeddings()
        optimizer, _ = wrap(
            way,
            model,
            torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
            **EXACT,
            values="float32",
            bucket_bytes=1,  # a bucket for each
        )
        for step in range(8):
            optimizer.zero_grad()
            model.loss(step, hvd.rank()).backward()
            assert model.position.grad.data_ptr() == model.kind.grad.data_ptr(), "find another model for this test"
            optimizer.step()
        difference = worst_difference(model, dense)
        assert difference <= 1e-5, f"way {way}: {difference:.2e}"


@case
def forked_data_loader_workers_come_and_go():
    for way in "ab":
        model = make_model()
        expected = dense_reference(model, 6, momentum=0.9)
        optimizer, _ = wrap(way, model, sgd(model), **EXACT)
        done = 0
        for _ in range(2):  # epochs: workers are forked while the communication thread lives, and end
            loader = torch.utils.data.DataLoader(
                Batches(6), batch_size=None, num_workers=1, multiprocessing_context="fork"
            )
            for step, (x, y) in enumerate(loader):
                if step // 3 != done // 3:
                    continue
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                done += 1
        assert done == 6
        assert worst_difference(model, expected) <= 1e-5, (way, worst_difference(model, expected))


@case
def a_dozen_optimizers_that_nobody_closes():
    before = set(threading.enumerate())
    for way in "ab":
        for seed in range(12):
            model = make_model(seed)
            expected = dense_reference(model, 2, momentum=0.9)
            optimizer, _ = wrap(way, model, sgd(model), **EXACT)
            train(optimizer, model, 2)
            assert worst_difference(model, expected) <= 1e-5, (way, seed)
    OPENED.clear()
    del optimizer, model, _
    gc.collect()
    deadline = time.monotonic() + 300
    while len(left := set(threading.enumerate()) - before) > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert len(left) <= 2, left


@case
def averaged_and_copied_models_beside_the_trained_one():
    for way in "ab":
        model = make_model()
        expected = dense_reference(model, 6, momentum=0.9)
        optimizer, _ = wrap(way, model, sgd(model), **EXACT)
        ema = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, p, n: 0.5 * a + 0.5 * p)
        copies = []

        def after(step, ema=ema, model=model, copies=copies):
            ema.update_parameters(model)
            copies.append(copy.deepcopy(model))

        train(optimizer, model, 6, after=after)
        assert worst_difference(model, expected) <= 1e-5, way
        assert worst_difference(copies[-1], model) == 0
        assert worst_difference(copies[0], model) > 0
        again = copy.deepcopy(copies[2])
        loss_of(again, 9).backward()  # a copy's gradients are nobody's business
        train(optimizer, model, 1, start=6)


@case
def gradients_in_one_buffer_stay_there():
    """Their owner clears them as a whole, without the optimizer."""
    for way in "ab":
        model = make_model()
        trained = [p for p in model.parameters() if p.requires_grad]
        buffer = torch.zeros(sum(p.numel() for p in trained))
        for p, part in zip(trained, buffer.split([p.numel() for p in trained]), strict=True):
            p.grad = part.view_as(p)
        optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9)
        for step in range(3):
            buffer.zero_()
            assert not any(p.grad.any() for p in trained)
            loss_of(model, step).backward()
            optimizer.step()


@case
def tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.out = nn.Linear(20, 40), nn.Linear(40, 20), nn.Linear(20, 40)
            self.out.weight = self.first.weight
            self.head = nn.Linear(40, 10)

        def forward(self, x, branch="both"):
            return self.head(self.out(torch.relu(self.middle(torch.relu(self.first(x))))))

    for way in "ab":
        torch.manual_seed(3)
        model = Tied()
        expected = dense_reference(model, 5, momentum=0.9, weight_decay=0.01)
        optimizer, _ = wrap(way, model, sgd(model, weight_decay=0.01), **EXACT)
        train(optimizer, model, 5)
        assert worst_difference(model, expected) <= 1e-5, way
        assert model.out.weight is model.first.weight


@case
def two_models_that_train_each_other():
    """As in a GAN: each backward pass leaves gradients in the other's parameters, which its ``zero_grad`` drops."""

    def gan(distribute):
        torch.manual_seed(5)
        maker, judge = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 20)), nn.Linear(20, 10)
        optimizers = [distribute(m) for m in (maker, judge)]
        for step in range(4):
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))  # the same on all ranks
            for model, optimizer, sign in ((judge, optimizers[1], 1), (maker, optimizers[0], -1)):
                optimizer.zero_grad()
                fake = maker(x) if model is maker else maker(x).detach()
                for p in judge.parameters():
                    p.requires_grad_(model is judge)
                (sign * judge(fake).square().mean()).backward()
                optimizer.step()
        return torch.cat([p.detach().reshape(-1) for m in (maker, judge) for p in m.parameters()])

    expected = gan(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for way in "ab":
        made = gan(lambda model, way=way: wrap(way, model, sgd(model), **EXACT)[0])
        assert (made - expected).abs().max() <= 1e-5 * expected.abs().max(), way


@case
def lbfgs_whose_closure_exchanges():
    """All ranks have the same batch, so that the mean is each one's gradient."""

    def run(distribute):
        model = make_model()
        optimizer = distribute(
            model, torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], lr=0.1, max_iter=2)
        )

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, 0, rank=0)
            loss.backward()
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
            return loss

        for _ in range(3):
            if hasattr(optimizer, "skip_synchronize"):
                with optimizer.skip_synchronize():
                    optimizer.step(closure)
            else:
                optimizer.step(closure)
        return model

    expected = run(lambda model, optimizer: optimizer)
    for way in "ab":
        made = run(lambda model, optimizer, way=way: wrap(way, model, optimizer, values="float32", **EXACT)[0])
        assert worst_difference(made, expected) <= 1e-4, (way, worst_difference(made, expected))


# -- what is told ----------------------------------------------------------------------------------------------------


@case
def a_scaler_that_the_compressor_does_not_know_is_told_once():
    def told(way, **options):
        model = make_model()
        optimizer, compression = wrap(way, model, sgd(model), sparsity=0.9, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, step)).backward()
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
        compression.close()
        return [str(w.message) for w in caught if "GradScaler" in str(w.message)]

    for way in "ab":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        (text,) = told(way)
        assert "loss_scale=scaler" in text
        assert told(way, loss_scale=scaler) == []
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        assert told(way) == []


@case
def a_gradient_of_another_type_names_its_parameter_and_the_remedy():
    for way in "ab":
        for before, after in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
            model = make_model().to(before)
            optimizer, _ = wrap(way, model, sgd(model))
            model.to(after)

            def step(model=model, optimizer=optimizer, after=after):
                optimizer.zero_grad()
                model(torch.zeros(4, 20, dtype=after)).sum().backward()
                optimizer.step()

            on_every_rank(dgc.LayoutError, r"the gradient of '.*' is float.*before the optimizer is wrapped", step, way)


@case
def a_gradient_that_is_not_finite_is_told_with_rank_parameter_and_step():
    for _, model, optimizer, _ in each_way(sparsity=0.9):
        train(optimizer, model, 2)
        hook = model.left.weight.register_hook(lambda grad: grad * (float("nan") if hvd.rank() == 1 else 1.0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(optimizer, model, 2, start=2)
        hook.remove()
        texts = [str(w.message) for w in caught if "the step is refused" in str(w.message)]
        assert len(texts) == (1 if hvd.rank() < 2 else 0), texts
        assert all("in step 2" in text and "rank 1" in text for text in texts)
        assert hvd.rank() != 1 or "'left.weight'" in texts[0]


@case
def what_horovod_holds_of_ours_has_another_reference():
    """Its thread must never be the last one but Python's to let go of a tensor: for that it would need the GIL."""
    from dgc.torch import horovod

    with every_tensor_is_held(horovod, at_least=40):
        for way, chosen in itertools.product("ab", ("auto", "horovod")):
            model = make_model()
            optimizer, _ = wrap(way, model, sgd(model), sparsity=0.9, transport=chosen)
            train(optimizer, model, 3)


if __name__ == "__main__":
    run_cases()

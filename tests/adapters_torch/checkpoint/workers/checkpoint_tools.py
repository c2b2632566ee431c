"""A job that saves and loads checkpoints, and what it compares."""

import contextlib
import copy
import shutil

import horovod.torch as hvd
import torch
from adapters_torch.workers.models import flat, make_model, shared_folder, train, wrap

import dgc.torch as dgc

OPTIONS = dict(sparsity=0.9, values="float16")


def sgd(model, momentum=0.9):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, nesterov=momentum > 0, weight_decay=0.001)


class Job:
    """Model, optimizer and compressor in training."""

    def __init__(self, way="b", seed=0, width=64, hvd_options=None, **options):
        self.model = make_model(seed, width=width)
        self.optimizer, self.compression = wrap(
            way, self.model, sgd(self.model), hvd_options=hvd_options, **{**OPTIONS, **options}
        )
        self.steps = 0

    def train(self, steps):
        train(self.optimizer, self.model, steps, start=self.steps)
        self.steps += steps
        return self

    def objects(self):
        return dict(model=self.model, optimizer=self.optimizer, compression=self.compression)

    def save(self, folder, **more):
        dgc.save_checkpoint(folder, **self.objects(), **more)

    def load(self, folder, **more):
        return dgc.load_checkpoint(folder, **self.objects(), **more)

    def close(self):
        self.compression.close()

    def contents(self):
        """Copies of everything that a load could change."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        buffers = {i: copy.deepcopy(e) for i, e in self.optimizer.state_dict()["state"].items()}
        return flat(self.model).clone(), copy.deepcopy(groups), buffers, self.compression.state_dict()


def assert_equal(a, b, what):
    assert type(a) is type(b), what
    if isinstance(a, dict):
        assert a.keys() == b.keys(), what
        for key, value in a.items():
            assert_equal(value, b[key], f"{what} {key}")
    elif isinstance(a, (list, tuple)):
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other, what)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), what
    else:
        assert (a == b).all() if hasattr(a, "all") else a == b, what


@contextlib.contextmanager
def folders(*names):
    """Directories that all ranks know; gone afterwards."""
    made = [shared_folder(name) for name in names]
    try:
        yield made[0] if len(made) == 1 else made
    finally:
        hvd.barrier()
        if hvd.rank() == 0:
            for folder in made:
                shutil.rmtree(folder)


def files_of(folder):
    hvd.barrier()
    return sorted(p.name for p in folder.iterdir())


def own_file(folder, rank=1):
    return next(folder.glob(f"compressor-*-{rank:05d}-of-*"))

"""Every module has a test by its name at the mirrored place, or says here where it is tested."""

from pathlib import Path

import pytest

import dgc

HOUSE = Path(dgc.__file__).parent
TESTS = Path(__file__).parents[1]
FOLDERS = {"torch": "adapters_torch", "tensorflow": "adapters_tensorflow"}
"""Folders of another name: on the path, one that is called torch would hide the package."""

ELSEWHERE = {
    # Nothing to test but that it is there: classes of errors, a protocol.
    "errors.py": "core/wire/test_message.py",
    "core/transport.py": "transport/test_local.py",
    # A command that prints the registry's table.
    "__main__.py": "core/compressors/test_registry.py",
    # Compiled loops of the quantizers and of the codecs of few bits.
    "core/wire/codecs/numba_packing.py": "core/compressors/quantizers/test_numba_loops.py",
    # One flow in three files.
    "adapter/paddle/methods.py": "adapter/test_face.py",
    "adapter/paddle/options.py": "adapter/test_paddle.py",
    "adapter/paddle/regularizers.py": "adapter/test_paddle.py",
    "adapter/paddle/state.py": "adapter/test_paddle.py",
    # What only real ranks show: Horovod and the framework around it. Each stands with the cases that are about it.
    "torch/checkpoint/alone.py": "adapters_torch/checkpoint/test_load.py",
    "torch/checkpoint/before.py": "adapters_torch/checkpoint/test_load.py",
    "torch/checkpoint/ranks.py": "adapters_torch/checkpoint/test_save.py",
    "torch/checkpoint/rank_state.py": "adapters_torch/test_fsdp.py",
    "tensorflow/reduce/sparse_updates.py": "adapters_tensorflow/keras/test_sparse_updates.py",
    "torch/stock.py": "adapters_torch/test_binding.py",
    "torch/optimizer.py": "adapters_torch/test_equality.py",
    "torch/engine/adoption.py": "adapters_torch/test_equality.py",
    "torch/engine/step/replicas.py": "adapters_torch/test_bad_input.py",
    "torch/engine/sparse_gradients.py": "adapters_torch/test_unusual_use.py",
    "torch/engine/step/watch.py": "adapters_torch/test_unapplied.py",
    "torch/engine/horovod/owner.py": "adapters_torch/test_unapplied.py",
    "torch/engine/step/saved_state.py": "adapters_torch/test_habits.py",
    "torch/momentum/state.py": "adapters_torch/momentum/test_optimizer.py",
    "torch/zero/groups.py": "adapters_torch/zero/test_state.py",
    "torch/zero/ranks.py": "adapters_torch/zero/test_bad_input.py",
    "torch/zero/wrapped.py": "adapters_torch/zero/test_composition.py",
    "tensorflow/keras/callbacks/log.py": "adapters_tensorflow/test_inside.py",
    "tensorflow/summary.py": "adapters_tensorflow/test_inside.py",
    "tensorflow/optimizer.py": "adapters_tensorflow/test_tape.py",
    "tensorflow/engine/engine.py": "adapters_tensorflow/test_binding.py",
    "tensorflow/engine/group.py": "adapters_tensorflow/test_tape.py",
    "tensorflow/engine/horovod_shim.py": "adapters_tensorflow/test_tape.py",
    "tensorflow/engine/optimizers.py": "adapters_tensorflow/test_habits.py",
    "tensorflow/engine/horovod.py": "adapters_tensorflow/test_binding.py",
    "tensorflow/reduce/dense.py": "adapters_tensorflow/test_tape.py",
    "tensorflow/reduce/reducer.py": "adapters_tensorflow/test_tape.py",
    "tensorflow/reduce/settings.py": "adapters_tensorflow/test_compressor.py",
    # One behaviour in two Kerases: each test runs in both.
    "tensorflow/keras/accumulation.py": "adapters_tensorflow/keras/test_optimizer.py",
    "tensorflow/keras/layouts.py": "adapters_tensorflow/test_restored.py",
    "tensorflow/reduce/sums.py": "adapters_tensorflow/keras/test_optimizer.py",
    "tensorflow/keras/callbacks/horovod.py": "adapters_tensorflow/keras/test_optimizer.py",
    "tensorflow/keras/keras3.py": "adapters_tensorflow/keras/test_optimizer.py",
    "tensorflow/keras/legacy.py": "adapters_tensorflow/keras/test_optimizer.py",
    "tensorflow/keras/momentum/base.py": "adapters_tensorflow/keras/momentum/test_optimizer.py",
    "tensorflow/keras/momentum/compressor.py": "adapters_tensorflow/keras/momentum/test_optimizer.py",
    "tensorflow/keras/momentum/keras3.py": "adapters_tensorflow/keras/momentum/test_optimizer.py",
    "tensorflow/keras/momentum/legacy.py": "adapters_tensorflow/keras/momentum/test_optimizer.py",
    # Parts of a fused step that show in nothing but the step: what is fused, and that it equals a plain one.
    "torch/fuse/fused_set.py": "adapters_torch/fuse/test_step.py",
    "torch/fuse/plan.py": "adapters_torch/fuse/test_api.py",
    # Views and copies of the engine's tensors, in the tests of those that own them.
    "torch/engine/tensors.py": "adapters_torch/engine/test_device_tensors.py",
}
"""Module -> the test file that covers it; the reason stands above."""


def modules():
    return sorted(path.relative_to(HOUSE).as_posix() for path in HOUSE.rglob("*.py") if path.name != "__init__.py")


def mirrored(module):
    folder, _, rest = module.partition("/")
    path = Path(FOLDERS.get(folder, folder), rest) if rest else Path(module)
    return path.with_name(f"test_{path.name}")


@pytest.mark.parametrize("module", modules())
def test_every_module_has_its_test(module):
    own, other = mirrored(module), ELSEWHERE.get(module)
    if other is None:
        assert (TESTS / own).exists(), f"write tests/{own}, or say in ELSEWHERE which test covers {module}, and why"
    else:
        assert (TESTS / other).exists(), f"{module} is said to be tested by tests/{other}, which is not there"
        assert not (TESTS / own).exists(), f"{module} has tests/{own} by now: take it out of ELSEWHERE"


def test_exceptions_are_of_modules_that_exist():
    assert set(ELSEWHERE) <= set(modules())


def workers():
    return sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("workers/*_cases.py"))


@pytest.mark.parametrize("worker", workers())
def test_every_worker_bears_the_name_of_its_test(worker):
    path = TESTS / worker
    test = path.parents[1] / f"test_{path.stem.removesuffix('_cases')}.py"
    assert test.exists(), f"tests/{worker} has no {test.name} beside its folder"
    assert path.name in test.read_text(), f"{test.name} does not run {path.name}"

"""Every compressor in TensorFlow: it learns in a loop and in Keras' fit, replicas stay identical, PyTorch agrees."""

import horovod.tensorflow as hvd
import models as m
from documented import documented_compressor, own_names
from same_core_cases import both_agree
from worker_tools import case, run_cases

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck

OPTIONS = {
    "dgc": {"sparsity": 0.9},
    "topk": {"sparsity": 0.9},
    "strom": {"threshold": 0.05, "max_density": 0.1},
}
MORE = [
    ("topk", {"threshold": "global", "sparsity": 0.9}),
    ("qsgd", {"norm": "max", "bits": 2}),
    ("adacomp", {"momentum": 0.9, "momentum_masking": True}),
    ("onebit", {"means": "row", "momentum": 0.9, "nesterov": True}),
]
STEPS = 6


def options_of(name, options=None):
    return {"min_numel": 64, **OPTIONS.get(name, {}), **(options or {})}


def check(name):
    both_agree(name, options_of(name, {"momentum": 0.0} if name == "dgc" else {}), STEPS)
    # Keras' fit with its own momentum, which only dgc takes over.
    compression = getattr(dgck.Compression, name)(**options_of(name))
    model = m.compiled(m.keras.optimizers.SGD(0.05, momentum=0.5), compression=compression, run_eagerly=True)
    x, y = m.dataset(10, 0)
    before = model.evaluate(x, y, verbose=0)
    m.fit(model, 10)
    m.assert_replicas(m.values(model))
    assert model.evaluate(x, y, verbose=0) < before
    assert compression.stats.steps == 10
    assert compression.stats.last.bytes_sent < compression.stats.last.dense_bytes
    # Stock Horovod's tape.
    model = m.make_model()
    variables = m.raw(model.trainable_variables)
    inner = m.keras.optimizers.SGD(0.05)
    compression = getattr(dgc.Compression, name)(variables, optimizer=inner, **options_of(name))
    step = m.stepper(model, inner, compression, hvd, graph=False)
    for number in range(3):
        step(number)
    m.assert_replicas(m.values(model))


for _name in own_names():

    def _one(name=_name):
        check(name)

    _one.__name__ = _name
    case(_one)


@case
def the_documented_compressor_of_ones_own():
    check(documented_compressor()[1])


@case
def frameworks_agree_on_options_too():
    for name, options in MORE:
        both_agree(name, {"min_numel": 64, **options}, STEPS)


if __name__ == "__main__":
    run_cases()

"""Scripts of a single process."""

from pathlib import Path

WORKERS = Path(__file__).parent / "workers"

ALONE = """
import sys

sys.path.insert(0, sys.argv[1])
import models as m
import numpy as np
import dgc.tensorflow as dgc
from worker_tools import report

plain = m.make_model()
plain.compile(optimizer=m.keras.optimizers.SGD(0.05, momentum=0.9), loss=m.loss_function)
m.fit(plain, 5)
compression = dgc.Compression.dgc(**m.SPARSE)
model = m.compile_model(compression, learning_rate=0.05)
m.fit(model, 5)
for a, b in zip(m.values(model), m.values(plain), strict=True):
    np.testing.assert_array_equal(a, b)
assert compression.engine is None
assert model.optimizer.inner_optimizer.momentum == 0.9
report("done")
"""


STOCK = """
import sys

sys.path.insert(0, sys.argv[1])
import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
import dgc.tensorflow as dgc
from worker_tools import report

model = m.make_model()
inner = m.keras.optimizers.SGD(0.05, momentum=0.9)
variables = m.raw(model.trainable_variables)
compression = dgc.Compression.dgc(variables, optimizer=inner)
x, y = (tf.constant(t) for t in m.batch(0))

def step(wrap):
    with tf.GradientTape() as tape:
        loss = m.loss_function(y, model(x))
    return wrap(tape).gradient(loss, variables)

distributed = tf.function(lambda: step(lambda tape: hvd.DistributedGradientTape(tape, compression=compression)))
for a, b in zip(distributed(), step(lambda tape: tape), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
assert inner.momentum == 0.9
assert compression.state_dict()["inactive"]
report("done")
"""


def test_a_single_process_keeps_its_momentum_and_exchanges_nothing(ranks):
    result = ranks.run(ALONE, 1, WORKERS, launcher="single")
    assert result.values == ["done"]


def test_stock_horovod_traces_a_compressor_in_a_single_process(ranks):
    assert ranks.run(STOCK, 1, WORKERS, launcher="single").values == ["done"]

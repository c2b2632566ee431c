"""``tape.gradient`` without ``apply_gradients``: ``compression.discard_step()`` on 2 real ranks."""

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case, run_cases

import dgc.tensorflow as dgc

SKIPPED = (0, 3, 4, 7)
WAYS = {
    "wrapper in a graph": ("wrapper", True, {}),
    "wrapper eager": ("wrapper", False, {}),
    "stock in a graph": ("stock", True, {"groups": 1}),
    "stock, two groups": ("stock", False, {"groups": 2}),
}


def loop(way, options, *, skipped=(), steps=10, graph=True, hvd_options=None):
    """``steps`` updates at changing learning rates; calls in ``skipped`` are exchanged and discarded."""
    model, inner = m.make_model(), m.keras.optimizers.SGD(0.05, momentum=0.9)
    variables = m.raw(model.trainable_variables)
    compression, library = m.compressor(way, model, inner, **options)

    def gradients_of(x, y):
        own = hvd_options or {}
        return m.reduced(lambda: m.loss_function(y, model(x)), variables, compression, library, **own)

    if graph:
        gradients_of = tf.function(gradients_of)
    step = call = 0
    while step < steps:
        dropped = call in skipped
        inner.learning_rate = 0.3 if dropped else m.rate(2 * step)
        x, y = m.batch(100 + call if dropped else step)
        gradients = gradients_of(tf.constant(x), tf.constant(y * (30 if dropped else 1)))
        call += 1
        if dropped:
            assert compression is None or compression.discard_step()
            assert compression is None or not compression.discard_step()
            continue
        inner.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        step += 1
    return m.values(model), compression


@case
def a_discarded_step_equals_dense_that_drops_it():
    dense, _ = loop("dense", {}, skipped=SKIPPED)
    for name, (way, graph, hvd_options) in WAYS.items():
        options = {**m.SPARSITY_0, "discardable": True}
        found, compression = loop(way, options, skipped=SKIPPED, graph=graph, hvd_options=hvd_options)
        m.assert_close(found, dense, 1e-5)
        m.assert_replicas(found)
        assert compression.state_dict()["step"] == 10, name
        compression.close()


@case
def a_discarded_step_leaves_no_trace_at_99_percent():
    for way, graph, hvd_options in WAYS.values():
        options = {**m.SPARSE, "discardable": True}
        ends = []
        for skipped in ((), SKIPPED):
            found, compression = loop(way, options, skipped=skipped, graph=graph, hvd_options=hvd_options)
            ends.append((found, compression.residual_norm))
            compression.close()
        for a, b in zip(ends[0][0], ends[1][0], strict=True):
            np.testing.assert_array_equal(a, b)
        assert ends[0][1] == ends[1][1]


@case
def without_the_option_it_says_what_to_do():
    _, compression = loop("wrapper", m.SPARSE, steps=1)
    m.assert_raises(compression.discard_step, "discardable=True")
    compression.close()


@case
def a_rank_that_discards_alone_is_an_error_on_all():
    model = m.make_model()
    compression = dgc.Compression.dgc(momentum=0.9, discardable=True, **m.SPARSE)
    m.tape_step(model, compression)
    if hvd.rank() == 1:
        compression.discard_step()
    try:
        m.tape_step(model, compression, 1)
    except Exception as error:
        told = str(error)
    else:
        told = ""
    everybody = hvd.allgather_object("discarded on one rank and applied on another" in told, name="told")
    assert all(everybody), (everybody, told)


if __name__ == "__main__":
    run_cases()

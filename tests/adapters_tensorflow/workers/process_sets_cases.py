"""All ranks but one exchange gradients; that one trains alone."""

import functools
from unittest.mock import patch

import horovod.tensorflow as hvd
import models as m
import numpy as np
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc
import dgc.tensorflow.keras as dgck


@functools.cache
def sets():
    """All ranks but 1, and rank 1."""
    return hvd.add_process_set([r for r in range(hvd.size()) if r != 1]), hvd.add_process_set([1])


@case
def only_the_members_of_a_process_set_exchange():
    members, _ = sets()
    for transport in ("auto", "horovod"):
        model = m.make_model()
        inner = m.keras.optimizers.SGD(0.05, momentum=0.9)
        options = {**m.SPARSITY_0, "transport": transport}
        compression = dgc.Compression.dgc(optimizer=inner, process_set=members, **options)
        variables = m.raw(model.trainable_variables)
        for step in range(4):
            own = m.own_gradients(model, *m.batch(step))
            found = m.tape_step(model, compression, step, process_set=members)
            if step == 0 and hvd.rank() != 1:
                wanted = [
                    hvd.allreduce(g, op=hvd.Average, process_set=members, name=f"{transport}{i}")
                    for i, g in enumerate(own)
                ]
                for a, b in zip(found, wanted, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
            if hvd.rank() == 1:
                m.assert_equal(found, own)
            inner.apply_gradients(zip(found, model.trainable_variables, strict=True))
        if hvd.rank() == 1:
            assert compression.engine is None
            assert inner.momentum == 0.9
        else:
            assert compression.stats.steps == 4
            assert inner.momentum == 0
            first = hvd.broadcast(variables[0], 0, process_set=members, name=f"first{transport}")
            np.testing.assert_array_equal(first, variables[0])
    m.barrier()  # a rank that ends shuts Horovod, and MPI with it, down on all others


@case
def a_rank_outside_fits_again_with_the_members_wrapper():
    """One script for all ranks, which names the members' process set on the rank outside, too."""
    members, _ = sets()
    given = {"process_set": members}
    for place, in_wrapper, in_compressor in (("wrapper", given, {}), ("compressor", {}, given)):
        compression = dgc.Compression.dgc(**m.SPARSE, **in_compressor)
        model = m.compile_model(compression, model=m.make_model(1 + hvd.rank()), learning_rate=0.05, **in_wrapper)
        for first in (0, 3, 6):
            if first == 6:  # another model's weights on one rank, whose broadcast all take part in
                model.set_weights([w + hvd.rank() for w in model.get_weights()])
            m.fit(model, 3, first=first, callbacks=[m.ROOT(0)])
        assert compression.stats.steps == (0 if hvd.rank() == 1 else 9)
        for i, value in enumerate(m.values(model) if hvd.rank() != 1 else []):
            first = hvd.broadcast(tf.constant(value), 0, process_set=members, name=f"again {place} {i}")
            np.testing.assert_array_equal(first, value)
    m.barrier()


@case
def a_checkpoint_of_a_process_set_without_rank_0_resumes_bit_for_bit():
    members, folder = hvd.add_process_set([1, 2]), m.shared_folder()

    def made():
        return m.compile_model(dgc.Compression.dgc(**m.SPARSE), learning_rate=0.05, process_set=members)

    model, again = made(), made()
    m.fit(model, 3, callbacks=[dgck.callbacks.CompressionCheckpoint(folder / "dgc")])
    again.set_weights(model.get_weights())
    again.optimizer.iterations.assign(3)
    m.fit(model, 3, first=3)
    with patch("cloudpickle.load", side_effect=AssertionError("a pickle was read")):
        m.fit(again, 3, first=3, callbacks=[dgck.callbacks.CompressionCheckpoint(folder / "dgc")])
    if hvd.rank() > 0:
        m.assert_equal(m.values(again), m.values(model))
    m.barrier()


@case
def stock_horovod_over_another_process_set():
    members, _ = sets()
    if hvd.rank() != 1:
        model = m.make_model()
        inner = m.keras.optimizers.SGD(0.05, momentum=0.9)
        variables = m.raw(model.trainable_variables)
        compression = dgc.Compression.dgc(variables, optimizer=inner, process_set=members)

        # Raised while Horovod's function is traced: TensorFlow gives it a class of its own.
        step = functools.partial(m.tape_step, model, compression, library=hvd)
        m.assert_raises(step, "ConfigError", "another process set than the compressor")
        assert len(step(process_set=members)) == len(variables)
        compression.close()
    m.barrier()

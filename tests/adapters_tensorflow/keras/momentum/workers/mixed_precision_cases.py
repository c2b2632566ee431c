"""DGCMomentum under mixed_float16 on real ranks: one rank's overflow is everybody's."""

import itertools

import adapters_tensorflow.workers.models as m
import horovod.tensorflow as hvd
import momentum_models as mm
import numpy as np
import tensorflow as tf
from worker_tools import case, run_cases

keras = m.keras
(keras.mixed_precision.set_global_policy if m.LEGACY else keras.mixed_precision.set_dtype_policy)("mixed_float16")


@case
def an_overflow_on_one_rank_skips_the_step_on_all():
    optimizer = mm.make(learning_rate=0.01, sparsity=[0.9], min_numel=64)
    model = m.make_model()
    model.compile(optimizer=optimizer, loss=m.loss_function)
    x, y = m.dataset(12)
    if hvd.rank() == 1:
        # Finite in float32, infinite in float16: the fifth batch of this rank alone.
        x[4 * 8], y[4 * 8] = 1e6, 1e6
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            scale = self.model.optimizer.loss_scale if m.LEGACY else self.model.optimizer.dynamic_scale
            seen.append(([v.copy() for v in m.values(model)], float(tf.convert_to_tensor(scale))))

    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[Watch()])
    assert len(seen) == 12
    for before, after in itertools.pairwise(seen):
        m.assert_replicas(after[0])
        same = all((a == b).all() for a, b in zip(before[0], after[0], strict=True))
        assert same is (after[1] < before[1]), "a step is skipped exactly where the scale was halved"
    assert all((a == b).all() for a, b in zip(seen[3][0], seen[4][0], strict=True)), "the fifth step was not skipped"
    assert all(np.isfinite(v).all() for v in seen[-1][0])
    stats = optimizer.stats
    assert stats.refused_steps >= 1
    assert optimizer.state_dict()["step"] == 12 - stats.refused_steps


if __name__ == "__main__":
    run_cases()

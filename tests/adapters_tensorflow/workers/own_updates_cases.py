"""Keras optimizers with an update of the user's own, which may change gradients: their momentum stays in them."""

import horovod.tensorflow as hvd
import models as m
import tensorflow as tf
from worker_tools import case

import dgc.tensorflow as dgc

keras = m.keras
LEFT = "momentum stays in the optimizer"


def normed(gradients):
    return [g / (tf.norm(g) + 1e-9) for g in gradients]


def subclass(name, change):
    """Keras' SGD with one method of its own."""
    return type("Own", (keras.optimizers.SGD,), {name: change(getattr(keras.optimizers.SGD, name))})


def first_argument(method):
    return lambda self, gradients, *more, **options: method(self, normed(gradients), *more, **options)


def pairs_of(method):
    def changed(self, pairs, *more, **options):
        gradients, variables = zip(*pairs, strict=True)
        return method(self, zip(normed(gradients), variables, strict=True), *more, **options)

    return changed


def compiled_first_argument(method):
    return tf.function(lambda self, gradient, *more: method(self, normed([gradient])[0], *more), autograph=False)


class Normalised(keras.optimizers.SGD):
    """Gives every gradient the norm 1 before the update, much as LARS does."""

    def update_step(self, gradient, variable, *rate):
        super().update_step(normed([gradient])[0], variable, *rate)


def on_the_instance(**options):
    optimizer = keras.optimizers.SGD(0.02, **options)
    plain = optimizer.update_step
    optimizer.update_step = lambda gradient, *more: plain(normed([gradient])[0], *more)
    return optimizer


def made(cls):
    return lambda **options: cls(0.02, **options)


OWN = {
    "update_step()": made(Normalised),
    "an instance's": on_the_instance,
    "clipping": made(subclass("_clip_gradients", first_argument)),
}
if m.LEGACY:
    OWN |= {
        "internal": made(subclass("_internal_apply_gradients", pairs_of)),
        "pairs": made(subclass("apply_gradients", pairs_of)),
    }
else:
    OWN |= {
        "backend's": made(subclass("_backend_update_step", first_argument)),
        "apply": made(subclass("apply", first_argument)),
        "compiled": made(subclass("update_step", compiled_first_argument)),
    }


@case
def whatever_of_the_users_own_changes_gradients_sees_gradients():
    plain = m.values(m.fitted(keras.optimizers.SGD(0.02, momentum=0.9)))
    for name, make in OWN.items():
        dense = m.values(m.fitted(make(momentum=0.9)))
        assert any(abs(a - b).max() > 1e-2 for a, b in zip(dense, plain, strict=True)), f"{name}: nothing is changed"
        with m.warned(LEFT) as said:
            graph = name == "update_step()"
            found = m.values(m.fitted(make(momentum=0.9), dgc.Compression.dgc(**m.SPARSITY_0), graph=graph))
        m.assert_close(found, dense, 1e-5)
        assert len(said) == (hvd.rank() == 0), (name, said)
        assert all("pass momentum= to the compressor" in text and (not graph or name in text) for text in said)


@case
def a_momentum_assigned_later_stays_with_an_update_of_the_users_own():
    dense = m.values(m.fitted(Normalised(0.02, momentum=0.9)))
    inner = Normalised(0.02)
    model = m.eager(inner, dgc.Compression.dgc(**m.SPARSITY_0))
    inner.momentum = 0.9
    m.fit(model, 6)
    m.assert_close(m.values(model), dense, 1e-5)

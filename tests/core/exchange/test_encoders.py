"""Which encoder a bucket gets, and that sizes are checked before training."""

from types import SimpleNamespace

import pytest
from documented import own_names
from exchange_tools import parameters

from dgc.core import compressors
from dgc.core.compressors import make_config
from dgc.core.compressors.quantizers import Onebit, Qsgd
from dgc.core.compressors.sparsifiers import Topk
from dgc.core.exchange.choice import make_plans
from dgc.core.exchange.encoders import AlgorithmEncoder, TopKEncoder, is_unchanged, kernels_select
from dgc.core.exchange.sizes import Setting
from dgc.core.kernels.reference import ReferenceKernels
from dgc.core.layout import Parameter, make_layout
from dgc.errors import ConfigError, LayoutError

TRANSPORT = SimpleNamespace(rank=0, size=2, name="none", has_alltoall=False)


def encoders(config, specs=None):
    layout = make_layout(specs or parameters(), config)
    made = [plans[1.0 - config.sparsities[-1]] for plans in make_plans(layout, config, ReferenceKernels(), TRANSPORT)]
    return [plan.encoder for plan in made if plan.encoder.ks]


@pytest.mark.parametrize(
    ("name", "options", "plain"),
    [
        *((name, {}, name in ("dgc", "topk")) for name in own_names()),
        ("topk", {"threshold": "global"}, False),
    ],
)
def test_a_plain_selection_has_the_encoder_that_masks_and_others_their_algorithm(name, options, plain):
    config = make_config({"min_numel": 64, **options}, algorithm=name)
    assert kernels_select(config) is plain
    assert {type(encoder) for encoder in encoders(config)} == {TopKEncoder if plain else AlgorithmEncoder}


def test_an_algorithm_refuses_the_kernels_of_a_device():
    class OnDevice(ReferenceKernels):
        on_device = True

    layout = make_layout(parameters(), config := make_config({"min_numel": 64}, algorithm="qsgd"))
    setting = Setting(layout.buckets[0], config, 1.0, 2)
    with pytest.raises(ConfigError, match="'qsgd' works on host memory; give it the kernels of the CPU"):
        AlgorithmEncoder(setting, SimpleNamespace(name="qsgd", config=config), OnDevice(), TRANSPORT, layout)


def test_a_message_of_2_gib_is_refused_before_training():
    config = make_config({"sparsity": [0.999, 0.55], "values": "float32", "indices": "uint16"})
    with pytest.raises(LayoutError, match="the limit is 2 GiB: choose a higher sparsity"):
        encoders(config, [Parameter("w", (2**15, 2**15), "float32")])


@pytest.mark.parametrize("base", [Onebit, Qsgd, Topk])
def test_a_users_own_encoding_is_not_replaced_by_ours(base, monkeypatch):
    """Whoever derives from one of our compressors and changes what is sent has the change in every step."""

    class Relabelled(base):
        name, number, source = "relabelled", 201, "somebody"

    class Changed(Relabelled):
        name, number = "changed", 200

        def encode_tensor(self, x, out, tensor, spec, info):
            return super().encode_tensor(x * 0, out, tensor, spec, info)

    class Further(Changed):
        name, number = "further", 202

    assert [is_unchanged(c) for c in (base, Relabelled, Changed, Further)] == [True, True, False, False]
    for row, changed in ((Relabelled, False), (Further, True)):
        monkeypatch.setitem(compressors._BY_NAME, row.name, row)
        config = make_config({"min_numel": 64}, algorithm=row.name)
        assert kernels_select(config) is (base is Topk and not changed)
        expected = AlgorithmEncoder if changed or base is not Topk else TopKEncoder
        assert {type(encoder) for encoder in encoders(config)} == {expected}

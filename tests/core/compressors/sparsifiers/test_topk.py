"""Top-k with one threshold for all tensors."""

import numpy as np
from contract_tools import Alone, Case, train

from dgc.core.compressors import SparseValues


def test_a_global_threshold_follows_the_last_step_over_all_tensors():
    case = Case("topk", {"threshold": "global", "sparsity": 0.9, "headroom": 5.0, "values": "float32"})
    shapes = {"small": (40, 50), "large": (40, 50)}
    alone = Alone(case, shapes)
    rng = np.random.default_rng(4)
    x = alone.flat({"small": rng.standard_normal(2000) * 0.1, "large": rng.standard_normal(2000)})
    alone.encode(x)
    alone.algorithm.finish(alone.spec, alone.thresholds, refused=False)
    threshold = alone.thresholds[0, 0]
    assert threshold == np.sort(np.abs(x))[3600 - 1]
    assert (alone.thresholds[:, 0] == threshold).all()
    decoded, count, _ = alone.sent(x, step=1)
    assert isinstance(decoded, SparseValues)
    np.testing.assert_array_equal(decoded.positions, np.flatnonzero(np.abs(x) > threshold))
    assert count == 400
    _, large = alone.tensors if alone.tensors[0].name == "small" else alone.tensors[::-1]
    inside = (decoded.positions >= large.offset) & (decoded.positions < large.offset + large.n)
    assert inside.sum() > 0.99 * count, "almost all entries come from the tensor with the larger ones"


def test_a_refused_step_leaves_the_global_threshold():
    alone = Alone(Case("topk", {"threshold": "global"}), {"w": (40, 50)})
    alone.encode(alone.random())
    alone.algorithm.finish(alone.spec, alone.thresholds, refused=True)
    assert np.isnan(alone.thresholds[:, 0]).all()


def test_a_global_threshold_keeps_the_share_over_steps():
    case = Case("topk", {"threshold": "global", "sparsity": 0.95})
    densities = []
    train(
        2,
        12,
        case,
        shapes={"a": (100, 100), "b": (50, 200), "c": (30, 30)},
        on_step=lambda rank, step, exchange, *rest: densities.append(exchange.stats.last.density),
        bucket_bytes=40_000,
    )
    assert 0.02 < np.mean(densities[8:]) < 0.08

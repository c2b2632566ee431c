"""What every compressor promises, run over all rows of the registry."""

import functools
import math

import numpy as np
import pytest
from contract_tools import (
    CASES,
    Alone,
    Case,
    gradients,
    make_exchange,
    on_ranks,
    payload_formula,
    snapshot,
    specs,
    train,
)
from exchange_tools import run_step, same_results

from dgc.core.compressors import compressor_names, make_config
from dgc.errors import ConfigError, DGCError, WireError

every = pytest.mark.parametrize("case", CASES, ids=str)
with_feedback = pytest.mark.parametrize("case", [c for c in CASES if c.row.error_feedback], ids=str)
unbiased = pytest.mark.parametrize("case", [c for c in CASES if c.row.unbiased], ids=str)
LONE = {"weight": (64, 80)}


@every
def test_replicas_are_identical_and_something_is_sent(case):
    runs = train(3, 4, case)
    assert all(np.isfinite(result).all() for results in runs[0][0] for result in results)
    for results, _ in runs[1:]:
        same_results(runs[0][0], results)
    sparse = [i for i, p in enumerate(specs()) if len(p.shape) > 1]
    assert all(any(runs[0][0][s][i].any() for s in range(4)) for i in sparse)


@with_feedback
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_is_not_sent_stays(case, momentum):
    """Over all ranks: residuals before + increments = residuals after + what was sent."""
    ranks, seen = 2, {}

    def keep(rank, step, exchange, given, got, before):
        seen[rank, step] = (given, got, before, snapshot(exchange))

    unmasked = {"momentum_masking": False} if case.row.sends_entries else {}
    train(ranks, 4, case, on_step=keep, momentum=momentum, **unmasked)
    for step in range(4):
        for i, parameter in enumerate(specs()):
            if len(parameter.shape) < 2:
                continue
            before = after = increment = 0
            for rank in range(ranks):
                given, got, old, new = seen[rank, step]
                before = before + old[i][1].astype(np.float64)
                after = after + new[i][1]
                velocity = momentum * old[i][0].astype(np.float64) + given[i]
                increment = increment + velocity
                if momentum:
                    np.testing.assert_allclose(new[i][0], velocity, rtol=1e-5, atol=1e-7)
            sent = ranks * got[i].astype(np.float64)
            np.testing.assert_allclose(sent + after, before + increment, rtol=1e-5, atol=3e-6)


@unbiased
def test_the_expectation_of_what_arrives_is_what_was_sent(case):
    """Each element's mean over many draws lies within its standard error, and so do all of them together."""
    alone, draws = Alone(case, {"weight": (20, 37), "small": (1, 3)}), 600
    # Uniform numbers have no outliers beyond 2.5 standard deviations that TernGrad would cut.
    x = alone.random()
    inside = np.concatenate([np.arange(t.offset, t.offset + t.n) for t in alone.tensors])
    x[inside] = np.random.default_rng(3).uniform(-1, 1, inside.size)
    decoded = np.array([alone.roundtrip(x, step=step)[inside] for step in range(draws)])
    error = decoded.mean(0) - x[inside]
    # A level that an element reaches once in a thousand draws may not have come up: hence the second term.
    step_between_levels = np.ptp(decoded, 0).max()
    deviation = np.sqrt((decoded.var(0) + step_between_levels**2 / draws) / draws)
    z = error / deviation
    assert np.abs(z).max() < 6
    assert abs(error.sum()) < 5 * np.sqrt((deviation**2).sum())
    assert 0.3 < (z**2).mean() < 1.4


@every
def test_zeros_stay_zeros(case):
    alone = Alone(case)
    decoded = alone.roundtrip(np.zeros(alone.bucket.sparse_size, np.float32))
    assert not decoded.any()


@every
@pytest.mark.parametrize("value", [0.0, 0.5, -0.25, 1e-30, -3e38])
def test_one_element(case, value):
    alone = Alone(case, {"one": (1, 1)})
    decoded = alone.roundtrip(alone.flat({"one": value}))
    assert np.isfinite(decoded).all()
    if case.row.unbiased or case.name in ("onebit", "dryden", "adacomp"):
        np.testing.assert_allclose(decoded[0], value, rtol=1e-6)


@every
def test_a_constant(case):
    alone = Alone(case, LONE)
    decoded = alone.roundtrip(alone.flat({"weight": 0.125}))
    if case.options.get("threshold") == "global":
        # Nothing is above the quantile of equal numbers; in the next step all is above the last one's.
        alone.algorithm.finish(alone.spec, alone.thresholds, refused=False)
        decoded = alone.roundtrip(alone.flat({"weight": 0.25}), step=1)
    assert np.isfinite(decoded).all()
    assert decoded.max() > 0
    if case.row.unbiased:
        assert decoded.mean() == pytest.approx(0.125, rel=0.2)
    elif not case.row.sends_entries:
        np.testing.assert_allclose(decoded, 0.125)


@every
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_refuses_the_step_everywhere(case, bad):
    def one_rank(exchange, rank):
        run_step(exchange, gradients(0, rank))
        before, given = snapshot(exchange), gradients(1, rank)
        if rank == 1:
            given[2][17] = bad
        refused, got = run_step(exchange, [g.copy() for g in given])
        assert refused
        assert exchange.state.step == 1
        assert all(np.isnan(g).all() for g in got)
        after = snapshot(exchange)
        for i, parameter in enumerate(specs()):
            if len(parameter.shape) < 2:
                continue
            if case.row.error_feedback:
                finite = np.where(np.isfinite(given[i]), given[i], 0)
                np.testing.assert_array_equal(after[i][1], before[i][1] + finite)
            else:
                assert not after[i][1].any()
        refused, got = run_step(exchange, gradients(2, rank))
        assert not refused
        assert all(np.isfinite(g).all() for g in got)
        return got

    same_results(*([got] for got in on_ranks(2, case, one_rank)))


@every
def test_half_precision_gradients(case):
    (first, exchange), (second, _) = train(2, 2, case, dtype="float16")
    assert exchange.state.buckets[0].v.dtype == np.float32
    same_results(first, second)
    for result in first[-1]:
        assert result.dtype == np.float32
        assert np.isfinite(result).all()


@every
def test_float64_is_sent_densely_and_exactly(case):
    """Whatever the compressor, also with ``include``: the mean of the ranks' gradients, in float64."""
    (first, exchange), (second, _) = train(2, 2, case, dtype="float64", include="*")
    assert not any(bucket.sparse for bucket in exchange.layout.buckets)
    same_results(first, second)
    for step, results in enumerate(first):
        given = zip(gradients(step, 0, dtype="float64"), gradients(step, 1, dtype="float64"), strict=True)
        same_results([results], [[(g + h) / 2 for g, h in given]])


@every
def test_a_saved_state_continues_as_if_nothing_had_happened(case):
    def one_rank(exchange, rank):
        first = [run_step(exchange, gradients(step, rank))[1] for step in range(3)]
        other = make_exchange(exchange.transport, case)
        other.load_state_dict(exchange.state_dict())
        return first + [run_step(other, gradients(step, rank))[1] for step in (3, 4)]

    for (expected, _), found in zip(train(2, 5, case), on_ranks(2, case, one_rank), strict=True):
        same_results(expected, found)


@every
def test_the_seed_decides_everything_random(case):
    seeds = [{"seed": seed} for seed in (5, 5, 6)] if case.row.unbiased else [{}, {}, {}]
    runs = [train(2, 2, case, **seed)[0][0] for seed in seeds]
    same, other = ([np.array_equal(a, b) for a, b in zip(runs[0][-1], run[-1], strict=True)] for run in runs[1:])
    assert all(same)
    assert all(other) is not case.row.unbiased


def test_ranks_tensors_and_steps_draw_different_numbers():
    alone = Alone(Case("terngrad"), {"a": (40, 40), "b": (40, 40)})
    x = alone.flat({"a": np.linspace(-1, 1, 1600), "b": np.linspace(-1, 1, 1600)})
    first = alone.roundtrip(x)
    a, b = (first[t.slice] for t in alone.tensors)
    assert not np.array_equal(a, b)
    for other in (alone.roundtrip(x, step=1), alone.roundtrip(x, rank=1)):
        assert not np.array_equal(first, other)
        assert np.corrcoef(first - x, other - x)[0, 1] == pytest.approx(0, abs=0.1)


@every
def test_messages_are_as_long_as_the_formula_says(case):
    """Measured on a tensor of a million elements: within 2 % and the header, all bytes of the exchange counted."""
    shape = (1000, 1000)
    # With all entries sent, a dense sum is shorter.
    wanted = 4 * math.prod(shape) if case.options == {"sparsity": 0.0} else payload_formula(case, shape)

    for _, exchange in train(2, 1, case, shapes={"weight": shape}):
        sent = exchange.stats.last.bytes_sent
        assert abs(sent - 64 - wanted) <= 0.02 * wanted + 16


@every
def test_damaged_messages_are_refused_or_read_within_bounds(case):
    """Nothing but a WireError; what is read lies within the bucket. Any other exception fails the test."""
    alone = Alone(case)
    rng = np.random.default_rng(1)
    message, count, _ = alone.encode(alone.random())
    for trial in range(400):
        damaged = message.copy()
        kind = trial % 4
        if kind == 0:
            damaged[rng.integers(damaged.size, size=rng.integers(1, 9))] ^= np.uint8(1 << rng.integers(8))
        elif kind == 1:
            damaged = damaged[: rng.integers(damaged.size)]
        elif kind == 2:
            damaged = rng.integers(0, 256, damaged.size).astype(np.uint8)
        else:
            start = rng.integers(damaged.size)
            damaged[start : start + 8] = 0xFF
        wrong = int(rng.choice([count, 0, 1, count + 1, 2**32 - 1, rng.integers(2**31)]))
        try:
            decoded = alone.algorithm.decode(damaged, wrong, alone.spec)
        except WireError:
            continue
        assert alone.spread(decoded).shape == (alone.bucket.sparse_size,)


@every
def test_a_message_that_is_cut_short_or_promises_more_is_refused(case):
    alone = Alone(case)
    message, count, used = alone.encode(alone.random())
    with pytest.raises(WireError):
        alone.algorithm.decode(message, count + 1, alone.spec)
    # What lies behind the last entry of a message with room to spare may be missing: cut before that.
    content = max(1, int(np.flatnonzero(message)[-1]))
    for cut in np.linspace(0, min(used, content) - 1, 40).astype(int):
        with pytest.raises(WireError):
            alone.algorithm.decode(message[:cut], count, alone.spec)


@every
def test_a_rank_that_fails_tells_all_others(case, monkeypatch):
    """Before and while it encodes, after a step that went well; nobody waits in another collective of the step."""
    encode = case.row.encode

    def broken(self, x, out, spec, info):
        if info.rank == 1 and info.step == 1:
            raise MemoryError("no memory left")
        return encode(self, x, out, spec, info)

    def one_rank(exchange, rank, when):
        run_step(exchange, gradients(0, rank))
        before, given = snapshot(exchange), gradients(1, rank)
        if rank == 1 and when == "submitting":
            given[-1] = np.ones(3, np.float32)
        with pytest.raises(DGCError, match="has 3 elements" if when == "submitting" else "no memory left"):
            run_step(exchange, given)
        for old, new in zip(before, snapshot(exchange), strict=True):
            assert np.isfinite(new[1]).all()
            assert old[1].shape == new[1].shape

    on_ranks(3, case, functools.partial(one_rank, when="submitting"))
    if not case.row.is_plain_selection(make_config(case.options, algorithm=case.name)):  # which calls no method of it
        monkeypatch.setattr(case.row, "encode", broken)
        on_ranks(3, case, functools.partial(one_rank, when="encoding"))


@every
def test_before_the_ramp_up_everything_is_dense(case):
    runs = train(2, 3, case, rampup_begin_step=2)
    for step in range(2):
        given = zip(gradients(step, 0), gradients(step, 1), strict=True)
        same_results(runs[0][0][step : step + 1], [[(g + h) / np.float32(2) for g, h in given]])


@every
def test_clipping_bounds_what_a_rank_adds(case):
    def one_rank(exchange, rank):
        _, got = run_step(exchange, [np.full(64 * 80, 100.0, np.float32)])
        return got[0], exchange.state.residual(0)

    runs = on_ranks(2, case, one_rank, shapes=LONE, local_grad_clip_norm=0.5)
    total = 2 * runs[0][0].astype(np.float64) + sum(v for _, v in runs)
    if case.row.error_feedback:
        assert np.linalg.norm(total) == pytest.approx(2 * 0.5 * np.sqrt(2), rel=1e-3)
    else:
        assert np.abs(total).max() <= 100


@every
def test_a_loss_scale_is_divided_out_and_put_back(case):
    def one_rank(exchange, rank):
        return run_step(exchange, [g * np.float32(exchange.loss_scale) for g in gradients(0, rank)])[1]

    plain, scaled = (on_ranks(2, case, one_rank, loss_scale=scale)[0] for scale in (1.0, 1024.0))
    for a, b in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(a * np.float32(1024), b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", compressor_names())
def test_unknown_and_misplaced_options_name_the_valid_ones(name):
    with pytest.raises(TypeError, match=rf"Compression.{name} .*'sparcity'.*min_numel"):
        make_config({"sparcity": 0.9}, algorithm=name)
    misplaced = {"qsgd": "sparsity", "strom": "bits"}.get(name, "bucket_size")
    with pytest.raises(TypeError, match=misplaced):
        make_config({misplaced: 1}, algorithm=name)


OUT_OF_RANGE = [
    ("topk", {"threshold": "some"}),
    ("topk", {"headroom": 0.5}),
    ("topk", {"sparsity": 1.0}),
    ("strom", {"threshold": 0.0}),
    ("strom", {"threshold": -1.0}),
    ("strom", {"threshold": float("nan")}),
    ("strom", {"max_density": 0.0}),
    ("strom", {"max_density": 1.5}),
    ("dryden", {"sparsity": -0.1}),
    ("adacomp", {"conv_bin": 0}),
    ("adacomp", {"fc_bin": 16384}),
    ("adacomp", {"entries_per_bin": 0.5}),
    ("onebit", {"means": "all"}),
    ("qsgd", {"bits": 3}),
    ("qsgd", {"norm": "l1"}),
    ("qsgd", {"bucket_size": 0}),
    ("qsgd", {"seed": -1}),
    ("terngrad", {"clip_factor": 0.0}),
    ("dorefa", {"bits": 0}),
    ("dorefa", {"bits": 9}),
    ("dorefa", {"bits": 2.5}),
    ("dgc", {"values": "float8"}),
]


@pytest.mark.parametrize(("name", "options"), OUT_OF_RANGE, ids=str)
def test_values_out_of_range_say_what_is_allowed(name, options):
    with pytest.raises(ConfigError, match=r"allowed|Choose one|must be in|give") as caught:
        train(1, 1, Case(name, options))
    assert next(iter(options)) in str(caught.value)


def test_many_ranks_add_up_densely_what_they_would_have_gathered():
    """Where a dense sum moves fewer bytes than P messages, the same decoded values travel that way."""
    case, ranks, shapes = Case("qsgd", {"bits": 8}), 10, {"weight": (256, 256)}
    runs = train(ranks, 1, case, shapes=shapes)
    exchange = runs[0][1]
    assert exchange.ways() == "dense sum"
    assert exchange.stats.last.bytes_sent >= 4 * 256 * 256
    alone = Alone(case, shapes)
    decoded = [alone.roundtrip(gradients(0, r, shapes)[0], rank=r) for r in range(ranks)]
    np.testing.assert_allclose(runs[0][0][0][0], np.mean(decoded, 0), atol=1e-6)
    for results, _ in runs[1:]:
        np.testing.assert_array_equal(results[0][0], runs[0][0][0][0])


def test_topk_with_momentum_correction_and_masking_is_dgc():
    """The parts of DGC are options of every compressor with error feedback."""
    options = {"momentum": 0.9, "momentum_masking": True, "sparsity": 0.9, "local_grad_clip_norm": 1.0, "small": "int8"}
    ours = train(2, 5, Case("topk", options))
    dgc = train(2, 5, Case("dgc", options))
    same_results(ours[0][0], dgc[0][0])


@with_feedback
def test_masking_clears_the_momentum_where_entries_were_sent(case):
    if not case.row.sends_entries:
        with pytest.raises(TypeError, match="momentum_masking"):
            make_config({"momentum_masking": True}, algorithm=case.name)
        return

    alone = Alone(case)
    room = alone.algorithm.has_room_for_all(alone.spec)

    def look(rank, step, exchange, given, got, before):
        for (u, v), (u_before, v_before), g, p in zip(snapshot(exchange), before, given, specs(), strict=True):
            if len(p.shape) > 1:
                velocity = np.float32(0.9) * u_before + g
                sent = v != v_before + velocity
                if room or exchange.stats.last.density == 1.0:  # nothing is late, so no momentum is stale
                    sent[:] = False
                assert not u[sent].any()
                np.testing.assert_array_equal(u[~sent], velocity[~sent])

    train(2, 2, case, on_step=look, momentum=0.9, momentum_masking=True)

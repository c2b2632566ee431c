"""The exchange on a device against the exchange on a CPU: the device's own code and kernels, run by a processor."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from device_exchange_tools import SHAPES, assert_equal, device_kernels, one_step, run
from exchange_tools import gradient, make_exchange
from host_runtime import compiler
from rank_jobs import once

from dgc.core.exchange.encoders.device.topk import DeviceEncoder
from dgc.core.kernels.cpu.backend import NumbaKernels
from dgc.core.kernels.gpu.backend import DeviceKernels
from dgc.errors import DGCError, LayoutError, TransportError
from dgc.transport.local import run_ranks

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) for the kernels' text")

CASES = {
    "default": {"values": "float16", "momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "no momentum": {"values": "bfloat16", "indices": "int32"},
    "host codecs": {"values": "int8", "indices": "auto", "momentum": 0.9},
    "few bits": {"indices": "elias_fano", "values": "int2", "small": "int3", "momentum": 0.9},
    "sign": {"values": "sign", "momentum": 0.9, "momentum_masking": False},
    "ramp-up": {"momentum": 0.9, "nesterov": True, "sparsity": [0.9, 0.99], "rampup_begin_step": 2, "rampup_step": 4},
    "dense sum": {"momentum": 0.9, "sparsity": 0.5, "weight_decay": 0.01},
    "dense": {"momentum": 0.9, "rampup_begin_step": 100, "weight_decay": 0.01},
    "clipping": {"momentum": 0.9, "local_grad_clip_norm": 0.5},
    "global clipping": {"momentum": 0.9, "local_grad_clip_norm": 0.5, "clip_scope": "global", "bucket_bytes": 40000},
    "sum": {"momentum": 0.9, "op": "sum", "weight_decay": 0.01},
    "loss scale": {"momentum": 0.9, "loss_scale": 1024.0},
    "several buckets": {"momentum": 0.9, "bucket_bytes": 1000},
    "large vector": {"momentum": 0.9, "exclude": ["b.*"]},
    "coded": {"momentum": 0.9, "small": "int8", "weight_decay": 0.01, "loss_scale": 64.0},
    "coded and exact": {"values": "sign", "momentum": 0.9, "small": "float16", "exclude": ["c.*"]},
}


@pytest.mark.parametrize("ranks", once([3, 1]))
@pytest.mark.parametrize("case", CASES)
def test_equals_the_cpu(case, ranks):
    """Results, u, v and thresholds, bit for bit, over steps that nobody waits between."""
    options = {"sparsity": 0.99, **CASES[case]}
    exact = "clipping" not in case  # sums of squares are added up in another order
    got = run(device_kernels, ranks, 6, **options)
    wanted = run(lambda: NumbaKernels(1), ranks, 6, **options)
    if exact:
        assert_equal(got, wanted)
        return
    for (_, results, *_), (_, expected, *_) in zip(got, wanted, strict=True):
        for mine, theirs in zip(results, expected, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


WITH_NODES = ["default", "nesterov", "ramp-up", "dense", "loss scale", "several buckets", "coded"]


@pytest.mark.parametrize("case", WITH_NODES)
def test_ranks_that_send_as_one_equal_the_cpu(case):
    """Sums of a node pass through host memory, while nobody has waited for the gradients."""
    options = {"sparsity": 0.99, "nodes": [0, 0, 2], **CASES[case]}
    assert_equal(run(device_kernels, 3, 6, **options), run(lambda: NumbaKernels(1), 3, 6, **options))


IN_NODES = list(itertools.product(WITH_NODES, ([0, 0, 2], [0, 0, 2, 2], [0, 0, 0]), ("average", "sum")))


@pytest.mark.parametrize(
    ("case", "nodes", "op"),
    [
        pytest.param(*row, marks=[] if row[0] == "default" or row[1:] == ([0, 0, 2], "average") else pytest.mark.matrix)
        for row in IN_NODES
    ],
    ids=str,
)
def test_devices_that_add_up_within_a_node_equal_the_cpu(case, nodes, op):
    options = {"sparsity": 0.99, "nodes": nodes, "op": op, **CASES[case]}
    ranks = len(nodes)
    got = run(lambda: device_kernels(groups=True), ranks, 5, **options)
    assert_equal(got, run(lambda: NumbaKernels(1), ranks, 5, **options))


@pytest.mark.parametrize(("dtype", "limit"), [("float64", None), ("float16", 65504.0), ("float16", 0.001)])
def test_types(dtype, limit):
    """float64 state, float16 gradients, and results that do not fit (the step is refused on every rank)."""
    options = {"sparsity": 0.99, "momentum": 0.9, "values": "float16"}
    got = run(device_kernels, 2, 4, dtype=dtype, limit=limit, **options)
    assert_equal(got, run(lambda: NumbaKernels(1), 2, 4, dtype=dtype, limit=limit, **options))
    assert got[0][0][0] is (limit == 0.001)


@pytest.mark.parametrize("parameter", [0, 1])
@pytest.mark.parametrize("values", ["float16", "int8"])
def test_a_refused_step_is_taken_back(parameter, values):
    """An infinity in a sparsified or a dense tensor: NaN results where it was, and u and v as on the CPU."""
    options = {"sparsity": 0.99, "momentum": 0.9, "values": values, "bucket_bytes": 30000}
    spoil = (2, 1, parameter)
    got = run(device_kernels, 2, 5, spoil=spoil, **options)
    wanted = run(lambda: NumbaKernels(1), 2, 5, spoil=spoil, **options)
    assert got[0][0] == [False, False, True, False, False]
    assert np.isnan(got[0][1][2][parameter]).all()
    assert_equal(got, wanted)


def test_state_moves_between_device_and_cpu():
    options = {"sparsity": 0.99, "momentum": 0.9, "values": "float16"}

    def one_rank(transport):
        saved, outcomes = None, []
        for kernels in (device_kernels(), NumbaKernels(1), device_kernels()):
            exchange = make_exchange(transport, SHAPES, kernels=kernels, **options)
            if saved is not None:
                exchange.load_state_dict(saved)
            params = [None] * len(SHAPES)
            for _ in range(3):
                outcomes.append(one_step(exchange, exchange.state.step, transport.rank, params))
            saved = exchange.state_dict()
            exchange.close()
        return [results for _, results, _ in outcomes], saved

    def straight(transport):
        exchange = make_exchange(transport, SHAPES, kernels=NumbaKernels(1), **options)
        outcomes = [one_step(exchange, step, transport.rank, [None] * len(SHAPES)) for step in range(9)]
        exchange.close()
        return [results for _, results, _ in outcomes], exchange.state_dict()

    for (mine, state), (theirs, expected) in zip(run_ranks(2, one_rank), run_ranks(2, straight), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_array_equal(x, y)
        for name, entry in expected["parameters"].items():
            for key in entry:
                np.testing.assert_array_equal(state["parameters"][name][key], entry[key])


def in_order(exchange):
    """Let no bucket begin before all gradients are there: what is enqueued then depends on nobody's speed."""
    pipeline = exchange._pipeline

    def wait(step, index):
        with pipeline._step.lock:
            pipeline._step.lock.wait_for(lambda: not any(step.submissions.missing) or pipeline._step.closed)
            return not pipeline._step.closed

    pipeline._wait_for_gradients = wait


@pytest.mark.parametrize(
    ("more", "waits"),
    [({}, 1), ({"local_grad_clip_norm": 0.5}, 2), ({"local_grad_clip_norm": 0.5, "clip_scope": "global"}, 2)],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "limit"), [("float32", None), ("float16", 65504.0)])
@pytest.mark.parametrize("codecs", [("uint16", "float16"), ("elias_fano", "int2")], ids="-".join)
def test_the_host_waits_once_for_all_buckets(more, waits, dtype, limit, codecs):
    """No hidden synchronisation: one wait for the messages, one for norms, one for results of a narrow type."""

    def one_rank(transport):
        kernels = device_kernels()
        options = {"sparsity": 0.99, "bucket_bytes": 1000, "indices": codecs[0], "values": codecs[1], **more}
        exchange = make_exchange(transport, SHAPES, kernels=kernels, dtype=dtype, **options)
        in_order(exchange)
        counts, used = [], []
        for step in range(6):
            before = kernels.runtime.waits
            used.append(one_step(exchange, step, transport.rank, [None] * len(SHAPES), dtype=dtype, limit=limit))
            counts.append(kernels.runtime.waits - before)
        buckets = len(exchange.layout.buckets)
        exchange.close()
        return counts, buckets

    ((counts, buckets),) = run_ranks(1, one_rank)
    assert buckets > 2
    assert counts[-1] == waits + (limit is not None)


@pytest.mark.parametrize("streams", [1, 2])
def test_gradients_are_waited_for_before_they_are_read(streams):
    """One event for each bucket and stream, recorded when its last gradient is there."""

    class Ready:
        recorded = 0

        def __init__(self, stream):
            self.stream = stream

        def record(self):
            Ready.recorded += 1
            return SimpleNamespace(handle=100 * Ready.recorded + self.stream)

    def one_rank(transport):
        kernels = device_kernels()
        exchange = make_exchange(transport, SHAPES, kernels=kernels, sparsity=0.99, bucket_bytes=8000)
        in_order(exchange)
        seen = []

        def begin(*arguments, **options):
            seen.append(list(kernels.runtime.waited_for))
            return DeviceKernels.begin(kernels, *arguments, **options)

        kernels.begin = begin
        results = []
        for i, p in reversed(list(enumerate(exchange.layout.parameters))):
            g = gradient(0, 0, i, p.numel)
            results.append(g.copy())
            exchange.submit(i, g, results[-1], ready=Ready(i % streams))
        exchange.finish()
        kernels.wait()
        of_bucket = [{s.parameter % streams for s in b.segments} for b in exchange.layout.buckets]
        exchange.close()
        return seen, of_bucket, list(kernels.runtime.waited_for)

    ((seen, of_bucket, waited),) = run_ranks(1, one_rank)
    assert len(of_bucket) > 1
    count = sum(len(s) for s in of_bucket)
    assert [w // 100 for w in waited] == list(range(1, count + 1)), "in the order in which buckets were complete"
    at = 0
    for streams_of in of_bucket:
        assert {w % 100 for w in waited[at : at + len(streams_of)]} == streams_of
        at += len(streams_of)
    assert len(seen[0]) >= len(of_bucket[0])


def test_errors_reach_all_ranks():
    """A gradient that the device cannot read is an error of the exchange, on every rank."""

    def one_rank(transport):
        exchange = make_exchange(transport, SHAPES, kernels=device_kernels(), sparsity=0.99)
        for i, p in reversed(list(enumerate(exchange.layout.parameters))):
            kind = np.int32 if transport.rank == 1 and i == 0 else np.float32
            exchange.submit(i, np.zeros(p.numel, kind), np.zeros(p.numel, np.float32))
        with pytest.raises(DGCError, match="int32"):
            exchange.finish()
        exchange.close()

    run_ranks(2, one_rank)


@pytest.mark.parametrize("fault", ["collective", "submission"])
def test_what_was_begun_and_never_sent_stays_in_the_residual(fault):
    """All buckets have been enqueued and messages written when the step fails: nothing is lost."""

    def one_rank(transport):
        exchange = make_exchange(
            transport,
            SHAPES,
            kernels=device_kernels(),
            sparsity=0.99,
            momentum=0.9,
            values="float16",
            bucket_bytes=8000,
        )
        in_order(exchange)
        prepare, pipeline = exchange._pipeline._prepare_following, exchange._pipeline

        def fails(*_):
            raise TransportError("the network is gone")

        def prepare_and_fail(step, index):
            prepare(step, index)
            if fault == "collective":
                transport.allgather = fails
            else:
                pipeline._step.announce(LayoutError("a gradient is wrong"), 0)
                raise LayoutError("a gradient is wrong")

        pipeline._prepare_following = prepare_and_fail
        grads = [gradient(0, 0, i, p.numel) for i, p in enumerate(exchange.layout.parameters)]
        for i in reversed(range(len(grads))):
            exchange.submit(i, grads[i], np.zeros_like(grads[i]))
        with pytest.raises(DGCError, match=r"the network is gone|a gradient is wrong"):
            exchange.finish()
        sparse = [(b.index, s) for b in exchange.layout.buckets for s in b.sparse]
        assert len({index for index, _ in sparse}) > 1
        for index, segment in sparse:
            for kept in (exchange.state.buckets[index].u, exchange.state.buckets[index].v):
                np.testing.assert_array_equal(kept[segment.slice], grads[segment.parameter])
        exchange.close()

    run_ranks(1, one_rank)


def test_damaged_messages_are_refused_whole():
    def one_rank(transport):
        gather = transport.allgather

        def damaged(message, out):
            gather(message, out)
            if out.shape[1] > 300:
                out[0, 64:68] ^= 0xFF  # the entry count of the first tile

        transport.allgather = damaged
        exchange = make_exchange(transport, SHAPES, kernels=device_kernels(), sparsity=0.99)
        before = exchange.state.residual_norm()
        with pytest.raises(DGCError, match="message of rank 0"):
            one_step(exchange, 0, transport.rank, [None] * len(SHAPES))
        assert exchange.state.residual_norm() >= before
        exchange.close()

    run_ranks(2, one_rank)


def test_the_core_chooses_the_step():
    (exchange,) = run_ranks(1, lambda t: make_exchange(t, SHAPES, kernels=device_kernels(deferred=False)))
    assert all(type(b.encoder) is DeviceEncoder for b in exchange._buckets)
    with pytest.raises(LayoutError):
        exchange._kernels.mask(*np.zeros((2, 4), np.float32), np.array([1]), np.zeros(2, np.float32), masking=True)

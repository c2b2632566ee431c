"""Whatever a step calls is compiled before the first one, by one process of a host, which says so."""

import ast
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from kernel_tools import run_script
from numba.core.dispatcher import Dispatcher

from dgc.adapter.warm_up import compiled
from dgc.core.compressors import make_config
from dgc.core.exchange import sizes
from dgc.core.exchange.exchange import Exchange
from dgc.core.kernels import choose_kernels, cpu, loops, sweep, threads
from dgc.core.kernels.cpu import NumbaKernels
from dgc.core.layout import Parameter, make_layout
from dgc.transport.local import run_ranks

CASES = [
    ("dgc", {}),
    ("dgc", {"sparsity": 0.95}),
    ("dgc", {"momentum": 0.9, "rampup_begin_step": 2, "sparsity": [0.5, 0.9], "rampup_step": 2}),
    ("dgc", {"local_grad_clip_norm": 1.0, "clip_scope": "global", "values": "int8", "small": "float16"}),
    ("topk", {"threshold": "global", "indices": "uint16", "values": "float16"}),
    ("strom", {"threshold": 0.5}),
    ("onebit", {}),
    ("qsgd", {}),
    ("terngrad", {}),
]


def in_use():
    """By kernel, how many kinds of arguments it was compiled for, or loaded."""
    found = {}
    for module in (cpu, loops, sweep, threads):
        for name, value in vars(module).items():
            if isinstance(value, Dispatcher):
                found[f"{value.__module__}.{name}"] = len(value.signatures)
    for bits, pair in loops.packing.items():
        found[f"packing {bits}"] = [len(each.signatures) for each in pair]
    return found


def three_steps(transport, config, kernels):
    parameters = [Parameter("w", (600, 500), "float32"), Parameter("b", (500,), "float32")]
    exchange = Exchange(make_layout(parameters, config), config, transport, kernels)
    for step in range(4):
        for i, p in enumerate(parameters):
            gradient = np.cos(np.arange(p.numel, dtype=np.float32) * (1 + step + transport.rank))
            exchange.submit(i, gradient, np.empty_like(gradient))
        exchange.finish()
    exchange.close()
    return exchange.ways()


@pytest.mark.parametrize(("algorithm", "options"), CASES)
def test_no_step_compiles_or_loads_anything(monkeypatch, algorithm, options):
    monkeypatch.setattr(sizes, "COLLECTIVE_BYTES", 0)  # so that owners pay for small tensors
    config = make_config(options, algorithm=algorithm)
    kernels = compiled(config, lambda: NumbaKernels(2), lambda made: made)
    before = in_use()
    many = options == {"sparsity": 0.95}
    ways = run_ranks(16 if many else 2, three_steps, config, kernels)
    assert set(ways) == {"owners"} or not many
    assert in_use() == before


def test_a_warm_up_leaves_a_used_compressor_as_it_was():
    kernels = choose_kernels("cpu")
    config = make_config({"exclude": "*", "include": "w", "hierarchical": "auto", "min_numel": 10**9})
    assert compiled(config, lambda: kernels, lambda made: made) is kernels


SOMEBODYS = """
    from dgc.adapter.warm_up import compiled
    from dgc.core.compressors import make_config, register
    from dgc.core.compressors.quantizers import Onebit
    from dgc.core.kernels import choose_kernels, cpu, loops
    @register
    class Somebodys(Onebit):
        name, number = "somebodys", 140
        def encode(self, *arguments):
            raise AssertionError("before the first step")
    compiled(make_config({}, algorithm="somebodys"), lambda: choose_kernels("cpu"), lambda kernels: kernels)
    print(len(cpu.update_tiles.signatures), len(loops.elias_fano_encode.signatures))
    dense_first = make_config({"sparsity": [0.0, 0.9], "rampup_step": 200})
    compiled(dense_first, lambda: choose_kernels("cpu"), lambda kernels: kernels)
    print(len(loops.elias_fano_encode.signatures))
"""


def test_what_is_compiled_for_a_compressor_of_somebody_else_and_for_a_ramp_up_that_begins_with_everything():
    """What the first shares with ours, without calling it; and the entries that the second sends later."""
    done = run_script(SOMEBODYS)
    assert done.stdout == "1 0\n1\n", done.stderr


COUNTING = """
    from numba.core import event
    from numba.core.dispatcher import Dispatcher
    from dgc.adapter.warm_up import compiled
    from dgc.core.kernels import loops
    from dgc.core.compressors import make_config
    from dgc.core.kernels import choose_kernels
    compiled(make_config({}), lambda: choose_kernels("cpu"), lambda kernels: kernels)
    from dgc.core.kernels import cpu, sweep, threads
    kernels = [v for m in (cpu, loops, sweep, threads) for v in vars(m).values() if isinstance(v, Dispatcher)]
    kernels = {id(k): k for k in kernels if type(k._cache).__name__ == "FunctionCache"}.values()
    print([f"{k.__name__}{kind}" for k in kernels for kind, count in k.stats.cache_misses.items() if count])
    print(len(cpu.tile_sums.signatures))
"""


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_processes_share_the_compiling_and_one_says_so_the_others_wait(tmp_path):
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    with ThreadPoolExecutor(3) as pool:
        several = list(pool.map(lambda _: run_script(COUNTING, **cache), range(3)))
    several.append(run_script(COUNTING, **cache))
    assert [d.returncode for d in several] == [0] * 4, [d.stderr for d in several]
    compiled = [ast.literal_eval(d.stdout.splitlines()[0]) for d in several]
    everything = [kernel for each in compiled for kernel in each]
    assert len(everything) == len(set(everything)) > 10, "compiled again what another one had compiled"
    assert compiled[3] == []
    assert sum(bool(each) for each in compiled) <= 2, "one compiles the kernels and one the codecs"
    assert [d.stderr.count("dgc compiles its kernels") for d in several].count(0) == 3
    assert all(str(tmp_path) in d.stderr for d in several if d.stderr)
    assert {d.stdout.splitlines()[1] for d in several} == {"0"}, "nobody clips"

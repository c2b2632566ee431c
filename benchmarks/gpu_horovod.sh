#!/usr/bin/env bash
# The second part, where Horovod can be built: training on CUDA tensors on real ranks. bash benchmarks/gpu_horovod.sh
#
# Horovod's and dgc's optimizer, DGCMomentum, GradScaler and sharded optimizers, each against the same training on the CPU. Builds
# Horovod if it is missing (`python -m dgc build-horovod`, which needs its sources, cffi, pycparser, a C++ compiler and,
# with a torch that has CUDA, nvcc). $RANKS ranks (2) share the devices.
# Results go to $OUT if that is set, else to benchmarks/results: gpu-horovod.txt. Ends with 0 only if all cases passed.
set -uo pipefail
cd "$(dirname "$0")/.."
out="${OUT:-benchmarks/results}"
python="${PYTHON:-python3}"
mkdir -p "$out"
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"

"$python" -c "import horovod.torch" 2>/dev/null || "$python" -m dgc build-horovod --install || exit 2
{
    date -u +%Y-%m-%dT%H:%MZ
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
    "$python" -c "import horovod, torch, horovod.torch as hvd; print('horovod', horovod.__version__, 'torch', torch.__version__, 'nccl', bool(hvd.nccl_built()))"
    "$python" -m horovod.runner.launch --gloo -np "${RANKS:-2}" "$python" tests/worker_tools.py tests/adapters_torch/workers/device_cases.py
} 2>&1 | tee "$out/gpu-horovod.txt"
exit "${PIPESTATUS[0]}"

#!/usr/bin/env bash
# Every test and benchmark that needs one GPU, in one go: bash benchmarks/gpu_check.sh
#
# Needs python3 (or $PYTHON) with NumPy, Numba, CuPy, PyTorch, pytest, pytest-timeout, hypothesis and psutil, and g++
# ($CXX). Neither Horovod nor TensorFlow nor MPI: those have gpu_horovod.sh. A test that skips itself has failed (DGC_REQUIRE_GPU=1).
# Results go to $OUT if that is set, else to benchmarks/results: gpu-machine.txt, gpu-tests.txt, gpu-benchmarks.txt,
# one file of figures a model, and one of whole steps. Ends with 0 only if everything ran and passed, with 2 where there is no device.
set -uo pipefail
cd "$(dirname "$0")/.."
out="${OUT:-benchmarks/results}"
python="${PYTHON:-python3}"
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" DGC_REQUIRE_GPU=1
failed=0

"$python" -c "from dgc.core.kernels.gpu import device_count; assert device_count() > 0" || {
    echo "no CUDA device that CuPy can use" >&2
    exit 2
}

{
    date -u +%Y-%m-%dT%H:%MZ
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
    "$python" -c "import cupy, numpy, torch; print('cupy', cupy.__version__, 'numpy', numpy.__version__, 'torch', torch.__version__)"
} >"$out/gpu-machine.txt" 2>&1

"$python" -m pytest -p no:cacheprovider tests/core/kernels/test_gpu.py tests/core/kernels/test_texts.py \
    tests/core/kernels/test_device.py tests/core/exchange/test_on_device.py tests/adapters_torch/test_gpu.py \
    tests/adapters_torch/test_device_tensors.py 2>&1 | tee "$out/gpu-tests.txt" || failed=1

: >"$out/gpu-benchmarks.txt"
for model in resnet50 flat transformer; do
    "$python" benchmarks/compress_gpu.py --model "$model" --out "$out" 2>&1 | tee -a "$out/gpu-benchmarks.txt" || failed=1
done
"$python" benchmarks/compressors_gpu.py --out "$out" 2>&1 | tee -a "$out/gpu-benchmarks.txt" || failed=1
exit "$failed"

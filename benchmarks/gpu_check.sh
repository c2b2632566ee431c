#!/usr/bin/env bash
# Every test and benchmark that needs a GPU, in one go: bash benchmarks/gpu_check.sh
#
# Results go to $OUT if that is set, else to benchmarks/results: gpu-tests.txt, gpu-benchmarks.txt and what the
# benchmarks write themselves. Python is $PYTHON, or the one on the PATH. Ends with 0 only if everything ran and passed.
set -uo pipefail
cd "$(dirname "$0")/.."
out="${OUT:-benchmarks/results}"
python="${PYTHON:-python}"
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=0

{
    date -u +%Y-%m-%dT%H:%MZ
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
    "$python" -c "import cupy, numpy; print('cupy', cupy.__version__, 'numpy', numpy.__version__)"
} >"$out/gpu-machine.txt" 2>&1

"$python" -c "from dgc.core.kernels.gpu.cupy_runtime import device_count; assert device_count() > 0" || {
    echo "no CUDA device that CuPy can use" >&2
    exit 2
}

"$python" -m pytest -m gpu tests -p no:cacheprovider 2>&1 | tee "$out/gpu-tests.txt" || failed=1
"$python" -m pytest tests/core/kernels/gpu/cuda/test_source.py tests/core/kernels/gpu/test_tables.py -p no:cacheprovider 2>&1 | tee -a "$out/gpu-tests.txt" || failed=1

: >"$out/gpu-benchmarks.txt"
for model in resnet50 flat transformer; do
    "$python" benchmarks/compress_gpu.py --model "$model" --out "$out" 2>&1 | tee -a "$out/gpu-benchmarks.txt" || failed=1
done
exit "$failed"

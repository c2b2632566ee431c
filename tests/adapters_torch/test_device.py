"""Training on a device's tensors, on real ranks. Here the device is the CPU; ``benchmarks/gpu_horovod.sh`` has GPUs."""

from pathlib import Path

from rank_jobs import each_case

test_device = each_case(Path(__file__).parent / "workers" / "device_cases.py")

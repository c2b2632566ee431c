"""DGCMomentum of PyTorch and of TensorFlow on the same gradients, on real ranks."""

from pathlib import Path

from rank_jobs import SIZES, each_case

test_pytorch_and_tensorflow_give_the_same_parameters = each_case(
    Path(__file__).parent / "workers" / "alike_cases.py", SIZES
)

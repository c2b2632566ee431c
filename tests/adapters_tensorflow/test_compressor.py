"""All compressors in TensorFlow, on 2 real ranks, beside PyTorch in the same processes."""

from pathlib import Path

from documented import own_names
from rank_jobs import each_case

test_compressors = each_case(Path(__file__).parent / "workers" / "compressor_cases.py", more=own_names())

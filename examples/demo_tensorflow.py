"""The comparison of examples/demo.py on TensorFlow: examples/tensorflow_digits.py under horovodrun.

.venv/bin/python examples/demo_tensorflow.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import demo

if __name__ == "__main__":
    demo.EXAMPLE = Path(__file__).resolve().parent / "tensorflow_digits.py"
    sys.exit(demo.main())

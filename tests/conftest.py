"""Makes the test tools importable (``launch_tools``, ``worker_tools``) however pytest was started."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
for _folder in (TESTS, TESTS.parent):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

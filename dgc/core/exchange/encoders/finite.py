"""Whether a step may count: are all values of an array finite?"""

from __future__ import annotations

import numpy as np


def is_finite(values: np.ndarray) -> bool:
    """Whether all of (n,) values are; one read without temporaries where their squares add up to a finite number."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(values, values)) or np.isfinite(values).all())

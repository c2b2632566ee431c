"""Names of variables, the same on all ranks.

Keras names layers by counting them, and a loaded model otherwise than a built one (``dense/kernel`` and
``sequential/dense/kernel``), so ranks that train the same model may have different names for its variables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from dgc.core.transport import Transport
from dgc.transport.agreement import gather_if_different

_COUNTED = re.compile(r"_[0-9]+(?=/|$|#)")


def common_names(transport: Transport, names: Sequence[str]) -> list[str]:
    """Rank 0's names where they differ from this rank's by Keras' counting and by leading parts only. Collective.

    Returns:
        This rank's own names where any rank has another number of variables or other names.

    Raises:
        TransportError: the ranks could not be asked.
    """
    gathered = gather_if_different(transport, {"names": list(names)})
    if gathered is None:
        return list(names)
    lists = [json.loads(entry["names"]) for entry in gathered]
    first = lists[0]
    alike = all(len(own) == len(first) and all(map(_alike, own, first)) for own in lists)
    return first if alike else list(names)


def _alike(one: str, other: str) -> bool:
    a, b = (_COUNTED.sub("", name).split("/") for name in (one, other))
    shorter = min(len(a), len(b))
    # The variable's own name and its layer's, where there is one.
    return a[-shorter:] == b[-shorter:] and (shorter > 1 or len(a) == len(b))

"""What holds a connection to the other ranks is neither copied nor pickled."""

from __future__ import annotations

from typing import Any


class Uncopied:
    """Mixed into such an optimizer, before the framework's own class."""

    uncopied: str
    """What cannot be done, why, and what to do instead."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Neither ``copy`` nor ``pickle``.

        Raises:
            TypeError: always.
        """
        raise TypeError(self.uncopied)

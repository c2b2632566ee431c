"""What holds a connection to the other ranks is neither copied nor pickled."""

from __future__ import annotations

from typing import Any


class Uncopied:
    """Mixed into such an optimizer or compressor, before the framework's own class.

    Attributes:
        uncopied: what cannot be done, why, and what to do instead; None while it can be done.
    """

    uncopied: Any = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """``copy`` and ``pickle`` ask for this.

        Raises:
            TypeError: it cannot be done.
        """
        if self.uncopied is not None:
            raise TypeError(self.uncopied)
        return super().__reduce_ex__(protocol)

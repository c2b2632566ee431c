"""Every error this package raises on purpose. A message says what was given, what is allowed and what to do."""

__all__ = ["ConfigError", "DGCError", "LayoutError", "RemoteError", "StallError", "TransportError", "WireError"]


class DGCError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(DGCError, ValueError):
    """An option is out of range, or options do not fit together."""


class LayoutError(DGCError, ValueError):
    """Parameters or gradients are not the ones the compressor was built for."""


class WireError(DGCError, ValueError):
    """A message is damaged, or was written by another version, layout or codec."""


class TransportError(DGCError, RuntimeError):
    """Bytes could not be moved between the ranks, or another rank reported an error."""


class StallError(TransportError):
    """Other ranks have not come to a collective for longer than a rank waits."""


class RemoteError(TransportError):
    """An error that happened on (at least) one rank and is raised on every rank of the job."""

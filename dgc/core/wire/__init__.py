"""The bytes of a bucket's message: header, index codecs, value codecs. ``docs/wire-format.md`` is the specification.

    message = header (64 bytes) | index block | value block | zeros up to a fixed size | dense section

Every block is a multiple of 8 bytes long, so each part of a message that starts on an 8-byte boundary does too.
"""

from dgc.core.wire.codecs.base import IndexCodec, IndexCodecId, ValueCodec, ValueCodecId
from dgc.core.wire.codecs.blocks import BLOCK_ALIGNMENT, padded
from dgc.core.wire.codecs.registry import (
    index_codec,
    index_codec_names,
    register_codec,
    resolve_index_codec,
    smallest_index_codec,
    value_codec,
    value_codec_names,
)
from dgc.core.wire.header import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Flags,
    Header,
    check_header,
    pack_header,
    unpack_header,
)

__all__ = [
    "BLOCK_ALIGNMENT",
    "HEADER_BYTES",
    "MAGIC",
    "VERSION",
    "Flags",
    "Header",
    "IndexCodec",
    "IndexCodecId",
    "ValueCodec",
    "ValueCodecId",
    "check_header",
    "index_codec",
    "index_codec_names",
    "pack_header",
    "padded",
    "register_codec",
    "resolve_index_codec",
    "smallest_index_codec",
    "unpack_header",
    "value_codec",
    "value_codec_names",
]

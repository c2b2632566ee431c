"""LZW as the program ``compress`` writes it, which Python's standard library cannot read."""

from __future__ import annotations

CLEAR = 256
MOST_BITS = 16


def decompress(data: bytes) -> bytes:
    """Decode one stream without its three bytes of header.

    Codes begin with 9 bits and grow to 16; the code 256 empties the table. Codes of one width are written in groups of
    eight, and what is left of a group is skipped where the width changes.

    Args:
        data: the codes.

    Raises:
        ValueError: a code that no writer would have used.

    Source: Welch 1984, "A Technique for High-Performance Data Compression"; the width's groups are compress(1)'s.
    """
    first = [bytes([value]) for value in range(256)] + [b""]
    table, bits, at, group_start = list(first), 9, 0, 0
    parts: list[bytes] = []
    before: bytes | None = None
    end = 8 * len(data)
    while True:
        if len(table) >= 1 << bits and bits < MOST_BITS:
            at = group_start = _next_group(at, group_start, bits)
            bits += 1
        if at + bits > end:
            return b"".join(parts)
        byte = at >> 3
        code = (int.from_bytes(data[byte : byte + 4], "little") >> (at & 7)) & ((1 << bits) - 1)
        at += bits
        if code == CLEAR:
            at = group_start = _next_group(at, group_start, bits)
            table, bits, before = list(first), 9, None
            continue
        if code < len(table):
            entry = table[code]
        elif code == len(table) and before is not None:
            entry = before + before[:1]
        else:
            raise ValueError(f"code {code} where {len(table)} are known")
        parts.append(entry)
        if before is not None and len(table) < 1 << MOST_BITS:
            table.append(before + entry[:1])
        before = entry


def _next_group(at: int, start: int, bits: int) -> int:
    width = 8 * bits
    return start + -(-(at - start) // width) * width

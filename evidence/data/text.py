"""English text that a package ships, as numbers of words."""

from __future__ import annotations

import itertools
import pydoc_data.topics
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from evidence.data.cache import build_once, load

BIBLE = Path("/usr/lib/bible.data")
PACKAGE = "bible-kjv-text"
UNKNOWN, END = "<unknown>", "<end>"
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|[0-9]+|[^\sa-z0-9]")


def prepare_words(vocabulary: int) -> str:
    """Build the words into the cache; returns the name to load them by.

    Args:
        vocabulary: how many words are told apart, :data:`UNKNOWN` for all others among them.

    Raises:
        EvidenceError: the cache cannot be written.
    """
    name = _name(vocabulary)
    build_once(name, lambda: _build(vocabulary))
    return name


def words(vocabulary: int) -> dict[str, np.ndarray]:
    """What :func:`prepare_words` has built.

    Returns:
        "train", "test": (n,) int64 numbers of words in the text's order; "source": one text.

    Raises:
        EvidenceError: it is not there.
    """
    return load(_name(vocabulary))


def _name(vocabulary: int) -> str:
    return f"words-{vocabulary}-1"


def _build(vocabulary: int) -> dict[str, np.ndarray]:
    sections, source = _sections()
    split = [[word for line in section for word in [*_WORD.findall(line.lower()), END]] for section in sections]
    # Every twentieth chapter is held out: all kinds of text are in both parts, and none stands in both.
    train = [word for i, section in enumerate(split) if i % 20 != 10 for word in section]
    test = [word for i, section in enumerate(split) if i % 20 == 10 for word in section]
    counts = Counter(train)
    known = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 1]
    number = {word: i for i, word in enumerate([UNKNOWN, *known])}
    return {
        "train": np.array([number.get(word, 0) for word in train], np.int64),
        "test": np.array([number.get(word, 0) for word in test], np.int64),
        "source": np.array(source),
    }


def _sections() -> tuple[list[list[str]], str]:
    """The text as chapters of lines, and where it is from."""
    data = _bible()
    if data is not None:
        return list(_chapters(read_bible(data))), f"the King James Bible, from Debian's package {PACKAGE}"
    topics = pydoc_data.topics.topics
    chapters = [topics[name].splitlines() for name in sorted(topics)]
    return chapters, f"the Python language's reference from pydoc's topics, since Debian's {PACKAGE} could not be had"


def _bible() -> bytes | None:
    """The file of Debian's package, which is fetched and unpacked where it is not installed; None without it."""
    if BIBLE.exists():
        return BIBLE.read_bytes()
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        # As a user without rights: nothing is installed.
        fetched = subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, capture_output=True, check=False)
        packages = list(Path(folder).glob("*.deb"))
        if fetched.returncode or not packages:
            return None
        subprocess.run(["dpkg-deb", "-x", packages[0], folder], capture_output=True, check=False)
        unpacked = Path(folder) / BIBLE.relative_to("/")
        return unpacked.read_bytes() if unpacked.exists() else None


def read_bible(data: bytes) -> str:
    """The text of a ``bible.data``: windows of 64 KiB, each compressed by itself.

    Args:
        data: the file: at byte 84 the size of a window and their number, then where each begins.

    Raises:
        ValueError: it is no such file.
    """
    if not data.startswith(b"EC02"):
        raise ValueError("no file of the Bible Retrieval System, version EC02")
    count = struct.unpack_from(">I", data, 88)[0]
    begins = [*struct.unpack_from(f">{count}I", data, 92), len(data)]
    return b"".join(_expanded(data[a:b]) for a, b in itertools.pairwise(begins)).decode("latin-1")


_COMPRESS = bytes([0x1F, 0x9D, 0x80 | 16])
"""The header of a file of the program ``compress``: codes of up to 16 bits, of which 256 empties the table."""


def _expanded(codes: bytes) -> bytes:
    """What ``compress`` has written without its header; Python's standard library cannot read it, and gzip can.

    Raises:
        ValueError: the codes are damaged.
    """
    done = subprocess.run(["gzip", "-dc"], input=_COMPRESS + codes, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"a part of the text cannot be read: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _chapters(text: str) -> Iterator[list[str]]:
    """Verses without their numbers, by chapter: a line is ``Ge1:1 In the beginning ...``."""
    chapter = ""
    verses: list[str] = []
    for line in text.splitlines():
        place, _, verse = line.partition(" ")
        if ":" not in place:
            continue
        if place.partition(":")[0] != chapter and verses:
            yield verses
            verses = []
        chapter = place.partition(":")[0]
        verses.append(verse)
    yield verses


def streams(numbers: np.ndarray, count: int) -> np.ndarray:
    """Cut a text into parallel ones.

    Args:
        numbers: (n,) words.
        count: how many streams.

    Returns:
        (count, n // count), each row a piece of the text.
    """
    length = len(numbers) // count
    return numbers[: count * length].reshape(count, length)

"""Decoding of text from users, with the position of bytes that are not UTF-8."""

from __future__ import annotations

from pathlib import Path

_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
"""Byte order marks, which editors on Windows write at the start of a file."""

BOM = b"\xef\xbb\xbf"
"""Byte order mark of UTF-8; JSON and TOML do not allow it."""


class NotUtf8(ValueError):
    """Bytes are not UTF-8. The text is a predicate, such as "is not UTF-8: ...".

    It has the position of the first wrong byte, from 0, and its line, from 1, or the encoding that
    a byte order mark names.
    """


def decode_utf8(raw: bytes, first: int = 0) -> str:
    """Decode `raw`, which begins at the byte `first` of its file, as UTF-8. Raises NotUtf8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        for mark, name in _MARKS:
            if raw.startswith(mark):
                raise NotUtf8(f"is {name} and not UTF-8") from error
        at = error.start
        line = raw.count(b"\n", 0, at) + 1
        raise NotUtf8(
            f"is not UTF-8: byte {first + at:,} (0x{raw[at]:02x}, in line {line:,}) is not part "
            "of a character"
        ) from error


def read_utf8(path: Path) -> str:
    return decode_utf8(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")

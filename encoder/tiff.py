"""Directories of tags, as a TIFF file and an EXIF block hold them; plain and BigTIFF, in either byte order."""

from __future__ import annotations

from struct import Struct, error, unpack_from

from encoder.stored_header import HeaderError

ORIENTATION = 274
WIDTH, HEIGHT, BITS, PHOTOMETRIC = 256, 257, 258, 262
_TYPES = {1: "B", 3: "H", 4: "I", 16: "Q"}  # of the tags read here; others are skipped

# Bounds on what a hostile file can make a reader walk through.
MAX_FRAMES = 10_000
_MAX_TAGS = 4_096


def directories(data: bytes) -> list[int]:
    """Offsets of the directories, one a page. Raises HeaderError when there is none, struct.error when it is cut."""
    order, big = _order(data), _is_big(data)
    entry_bytes = 20 if big else 12
    offsets: list[int] = []
    (offset,) = unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)
    seen = set()
    while offset and offset not in seen and len(offsets) < MAX_FRAMES:
        seen.add(offset)
        offsets.append(offset)
        try:
            (num_tags,) = unpack_from(order + ("Q" if big else "H"), data, offset)
            end = offset + (8 if big else 2) + num_tags * entry_bytes
            (offset,) = unpack_from(order + ("Q" if big else "I"), data, end)
        except error:  # a later page that is cut off leaves the first one readable
            break
    if not offsets:
        raise HeaderError("it has no directory")
    return offsets


def read_tags(data: bytes, offset: int) -> dict[int, int]:
    """First value of each whole-number tag in the directory at `offset`.

    Raises HeaderError when it has too many tags, struct.error when it ends early.
    """
    order, big = _order(data), _is_big(data)
    entry = Struct(order + ("HHQ" if big else "HHI"))
    entry_bytes, inline_bytes = (20, 8) if big else (12, 4)
    (num_tags,) = unpack_from(order + ("Q" if big else "H"), data, offset)
    if num_tags > _MAX_TAGS:
        raise HeaderError(f"its directory claims {num_tags} tags")
    tags: dict[int, int] = {}
    start = offset + (8 if big else 2)
    for position in range(start, start + num_tags * entry_bytes, entry_bytes):
        tag, kind, count = entry.unpack_from(data, position)
        letter = _TYPES.get(kind)
        if letter is None or count == 0:
            continue
        value_at = position + entry.size
        if count * Struct(order + letter).size > inline_bytes:
            if tag not in (WIDTH, HEIGHT, BITS):
                continue
            (value_at,) = unpack_from(order + ("Q" if big else "I"), data, value_at)
        (tags[tag],) = unpack_from(order + letter, data, value_at)
    return tags


def exif_orientation(exif: bytes) -> int:
    """Orientation in an EXIF block; 1 when the block says nothing or is broken."""
    tiff = exif.removeprefix(b"Exif\0\0")
    try:
        if tiff[:4] not in (b"II*\0", b"MM\0*"):
            return 1
        return valid_orientation(read_tags(tiff, unpack_from(_order(tiff) + "I", tiff, 4)[0]))
    except (error, HeaderError):
        return 1


def valid_orientation(tags: dict[int, int]) -> int:
    """What the tags say, 1 when it is none of the eight there are."""
    value = tags.get(ORIENTATION, 1)
    return value if 1 <= value <= 8 else 1


def _order(tiff: bytes) -> str:
    return "<" if tiff.startswith(b"II") else ">"


def _is_big(tiff: bytes) -> bool:
    return tiff[2:3] == b"+"

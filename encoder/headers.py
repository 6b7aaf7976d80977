"""Image headers, read straight from the bytes: no pixel is decoded and no decoder is set up.

It takes some ten microseconds where opening the file with Pillow takes a hundred or more, warns of nothing,
and answers the same whatever Pillow's version. `encoder.media` compares what Pillow then decodes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, error, unpack_from

from encoder import tiff
from encoder.stored_header import HeaderError, StoredHeader
from encoder.tiff import MAX_FRAMES

# A bound on what a hostile file can make a reader walk through.
_MAX_BLOCKS = 100_000  # JPEG segments, PNG and WebP chunks, GIF blocks; a real file of 64 MiB has some thousands


def read_header(data: bytes) -> StoredHeader | None:
    """Read the header of a JPEG, PNG, WebP, GIF, BMP or TIFF file; None when it is none of them.

    Raises HeaderError when the file starts as one of them and its header is damaged or ends early.
    """
    reader = _reader_of(data)
    if reader is None:
        return None
    try:
        return reader(data)
    except (error, IndexError, OverflowError) as failure:  # OverflowError: an offset of 64 bits
        raise HeaderError("it ends inside its header") from failure


def _reader_of(data: bytes) -> Callable[[bytes], StoredHeader] | None:
    if data.startswith(b"\xff\xd8\xff"):
        return _read_jpeg
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _read_png
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _read_webp
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _read_gif
    if data.startswith((b"II*\0", b"MM\0*", b"II+\0")):
        return _read_tiff
    if data.startswith(b"BM"):
        return _read_bmp
    return None


_JPEG_SEGMENT = Struct(">HH")  # marker, length
_JPEG_FRAME = Struct(">BHH")  # sample bits, height, width
_JPEG_FRAME_MARKERS = frozenset(range(0xFFC0, 0xFFD0)) - {0xFFC4, 0xFFC8, 0xFFCC}


def _read_jpeg(data: bytes) -> StoredHeader:
    size = None
    orientation = None
    exif_at: list[int] = []
    position = 2
    for _ in range(_MAX_BLOCKS):
        marker, length = _JPEG_SEGMENT.unpack_from(data, position)
        if marker == 0xFFFF:  # a fill byte before the marker
            position += 1
            continue
        if marker == 0xFFDA:  # the pixels start
            break
        if marker < 0xFF01 or length < 2:
            raise HeaderError(f"byte {position} should start a segment")
        if marker in _JPEG_FRAME_MARKERS:
            _, height, width = _JPEG_FRAME.unpack_from(data, position + 4)
            size = width, height
        elif marker == 0xFFE1 and data[position + 4 : position + 9] == b"Exif\0":
            exif_at.append(position + 4)
            if orientation is None:
                orientation = tiff.exif_orientation(data[position + 10 : position + 2 + length])
        position += 2 + length
    else:
        raise HeaderError(f"it has more than {_MAX_BLOCKS} segments")
    if size is None:
        raise HeaderError("it has no frame header, so no size")
    return StoredHeader(
        format="JPEG", width=size[0], height=size[1], orientation=orientation or 1, exif_at=tuple(exif_at)
    )


def _read_png(data: bytes) -> StoredHeader:
    if data[12:16] != b"IHDR":
        raise HeaderError("its first chunk is not IHDR")
    width, height, sample_bits, colour_type = unpack_from(">IIBB", data, 16)
    exif, num_frames, transparent = b"", 1, None
    position, seen_pixels = 33, False
    for _ in range(_MAX_BLOCKS):
        if position + 8 > len(data):
            break
        length, kind = unpack_from(">I4s", data, position)
        start = position + 8
        if kind == b"IDAT":
            seen_pixels = True
        elif kind == b"eXIf":  # before the pixels or after them
            exif = data[start : start + length]
        elif kind == b"acTL" and not seen_pixels:
            num_frames = max(1, unpack_from(">I", data, start)[0])
        elif kind == b"tRNS" and not seen_pixels and colour_type in (0, 2):
            transparent = unpack_from(">H" if colour_type == 0 else ">HHH", data, start)
        elif kind == b"IEND":
            break
        position = start + length + 4
    else:
        raise HeaderError(f"it has more than {_MAX_BLOCKS} chunks")
    return StoredHeader(
        format="PNG",
        width=width,
        height=height,
        orientation=tiff.exif_orientation(exif),
        num_frames=num_frames,
        sample_bits=sample_bits,
        transparent=transparent,
    )


def _read_webp(data: bytes) -> StoredHeader:
    kind = data[12:16]
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise HeaderError("its VP8 frame does not start with a key frame")
        width, height = unpack_from("<HH", data, 26)
        return StoredHeader(format="WEBP", width=width & 0x3FFF, height=height & 0x3FFF)
    if kind == b"VP8L":
        signature, bits = unpack_from("<BI", data, 20)
        if signature != 0x2F:
            raise HeaderError("its lossless frame has no signature")
        return StoredHeader(format="WEBP", width=(bits & 0x3FFF) + 1, height=(bits >> 14 & 0x3FFF) + 1)
    if kind != b"VP8X":
        raise HeaderError(f"its first chunk is {kind!r}, not VP8, VP8L or VP8X")
    width = int.from_bytes(data[24:27], "little") + 1
    height = int.from_bytes(data[27:30], "little") + 1
    exif, num_frames = b"", 0
    position = 30
    for _ in range(_MAX_BLOCKS):
        if position + 8 > len(data):
            break
        kind, length = unpack_from("<4sI", data, position)
        if kind == b"ANMF":
            num_frames += 1
        elif kind == b"EXIF":
            exif = data[position + 8 : position + 8 + length]
        position += 8 + length + (length & 1)
    else:
        raise HeaderError(f"it has more than {_MAX_BLOCKS} chunks")
    return StoredHeader(
        format="WEBP",
        width=width,
        height=height,
        orientation=tiff.exif_orientation(exif),
        num_frames=max(1, num_frames),
    )


def _read_gif(data: bytes) -> StoredHeader:
    width, height, flags = unpack_from("<HHB", data, 6)
    position = 13 + _gif_palette_bytes(flags)
    num_frames = num_blocks = 0
    while position < len(data) and num_frames < MAX_FRAMES and num_blocks < _MAX_BLOCKS:
        kind = data[position]
        if kind == 0x2C:  # a frame
            if position + 10 >= len(data):
                break
            left, top, frame_width, frame_height, flags = unpack_from("<HHHHB", data, position + 1)
            if num_frames == 0:  # a first frame that sticks out enlarges the picture
                width, height = max(width, left + frame_width), max(height, top + frame_height)
            num_frames += 1
            position += 11 + _gif_palette_bytes(flags)
        elif kind == 0x21:  # an extension
            position += 2
        elif kind == 0x3B:
            break
        else:
            position += 1
            num_blocks += 1
            continue
        while position < len(data) and num_blocks < _MAX_BLOCKS:
            run = data[position : position + 65_536 : 256]  # the lengths of blocks, as long as they are full
            position += 256 * (len(run) - len(run.lstrip(b"\xff")))
            if position >= len(data):
                break
            length = data[position]
            position += length + 1
            num_blocks += 1
            if length == 0:
                break
    if num_frames == 0:
        raise HeaderError("it holds no frame")
    return StoredHeader(format="GIF", width=width, height=height, num_frames=num_frames)


def _gif_palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _read_bmp(data: bytes) -> StoredHeader:
    (header_bytes,) = unpack_from("<I", data, 14)
    if header_bytes == 12:
        width, height = unpack_from("<HH", data, 18)
    elif header_bytes in (40, 52, 56, 64, 108, 124):
        width, height = unpack_from("<ii", data, 18)
    else:
        raise HeaderError(f"its header claims {header_bytes} bytes, which no BMP version has")
    return StoredHeader(format="BMP", width=width, height=abs(height))  # a negative height: rows from the top


def _read_tiff(data: bytes) -> StoredHeader:
    offsets = tiff.directories(data)
    tags = tiff.read_tags(data, offsets[0])
    if tiff.WIDTH not in tags or tiff.HEIGHT not in tags:
        raise HeaderError("its first directory names no size")
    return StoredHeader(
        format="TIFF",
        width=tags[tiff.WIDTH],
        height=tags[tiff.HEIGHT],
        orientation=tiff.valid_orientation(tags),
        num_frames=len(offsets),
        sample_bits=tags.get(tiff.BITS, 1),
        white_is_zero=tags.get(tiff.PHOTOMETRIC) == 0,
    )

"""Bytes to pixels: the header of an image, its limits, and an upright RGB picture of it.

Colours are taken as sRGB: embedded profiles are not applied, as vision models apply none in their own code.
Orientation is EXIF's. Files with several frames or pages give the first.
"""

from __future__ import annotations

import re
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from threading import Lock

import numpy as np
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from encoder.colours import to_rgb
from encoder.errors import BadMediaError, MediaTooLargeError
from encoder.headers import read_header
from encoder.stored_header import HeaderError, StoredHeader

FORMATS = "JPEG, PNG, WebP, GIF, BMP or TIFF"

SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .mpo .png .apng .webp .gif .bmp .dib .tif .tiff".split()  # noqa: SIM905
)
"""File name endings of images we read, in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaHeader:
    """What the header of an image or video says; the size is that of the upright picture."""

    width: int
    height: int
    format: str = ""
    num_frames: int = 1
    frames_per_s: float = 0.0  # above 0: a video, and its average rate
    note: str | None = None  # for the person who reads the result, such as "first of 12 frames"


def probe_header(data: bytes, *, max_pixels: int, max_bytes: int, wanted: str = FORMATS) -> MediaHeader:
    """Size and format of an encoded image, without decoding it. `wanted` is what to send instead of what is none.

    Raises BadMediaError for what is no image we read, MediaTooLargeError for one over a limit.
    """
    header = _checked_header(data, max_pixels, max_bytes, wanted)
    width, height = header.upright_size
    note = None
    if header.num_frames > 1:
        note = f"first of {header.num_frames} {'pages' if header.format == 'TIFF' else 'frames'}"
    return MediaHeader(width=width, height=height, format=header.format, num_frames=header.num_frames, note=note)


def decode_image(data: bytes, *, max_pixels: int, max_bytes: int) -> Image.Image:
    """Decode to an upright 8-bit RGB image of exactly the size that `probe_header` gives.

    16-bit samples are scaled, transparency is laid on white. Raises as `probe_header` does.
    """
    header = _checked_header(data, max_pixels, max_bytes)
    try:
        image = _upright(to_rgb(_load(data, header), header), header)
    except (BadMediaError, MediaTooLargeError):
        raise
    except Image.DecompressionBombError as failure:
        raise MediaTooLargeError(
            f"{header} is over Pillow's own limit; send it smaller or raise PIL.Image.MAX_IMAGE_PIXELS"
        ) from failure
    except MemoryError as failure:
        raise MediaTooLargeError(f"no memory to decode {header}; send it smaller") from failure
    except Exception as failure:  # Pillow's decoders answer a damaged file with whatever they stumble over
        raise BadMediaError(
            f"{header} cannot be decoded: {_reason(failure)}; it is damaged, incomplete "
            f"or of a rare kind: save it again as PNG or JPEG"
        ) from failure
    if image.size != header.upright_size:
        raise BadMediaError(f"{header} decodes to {image.width}x{image.height}: its header is damaged; save it again")
    return image


# --- before decoding ---


def _checked_header(data: bytes, max_pixels: int, max_bytes: int, wanted: str = FORMATS) -> StoredHeader:
    if len(data) > max_bytes:
        raise MediaTooLargeError(
            f"image file has {len(data)} bytes, the limit is {max_bytes}; send it smaller or raise encoder.max_bytes"
        )
    try:
        header = read_header(data)
    except HeaderError as failure:
        raise BadMediaError(
            f"image file of {len(data)} bytes is damaged or incomplete: {failure}; send it again"
        ) from failure
    if header is None:
        raise BadMediaError(f"{_describe(data)}; send {wanted}")
    if header.width < 1 or header.height < 1:
        raise BadMediaError(f"{header} has no pixels; its header is damaged: save it again")
    if header.width * header.height > max_pixels:
        raise MediaTooLargeError(
            f"{header} has {header.width * header.height} pixels, the limit is {max_pixels}; "
            f"send it smaller or raise encoder.max_pixels"
        )
    return header


_OTHER_KINDS: tuple[tuple[bytes, str], ...] = (
    (b"%PDF", "a PDF document"),
    (b"%!PS", "a PostScript file"),
    (b"8BPS", "a Photoshop document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"MM\x00+", "a big-endian BigTIFF image"),
    (b"\x00\x00\x01\x00", "an ICO icon"),
    (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000 image"),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL image"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (b"version https://git-lfs", "a Git LFS pointer instead of the file it stands for"),
)
_BRANDS = {
    b"avif": "an AVIF image",
    b"avis": "an AVIF image",
    b"heic": "an HEIC image",
    b"mif1": "an HEIF image",
}


def _describe(data: bytes) -> str:
    """What came instead of an image we read."""
    if not data:
        return "the file is empty"
    for magic, kind in _OTHER_KINDS:
        if data.startswith(magic):
            return f"the file is {kind}"
    if data[4:8] == b"ftyp":
        return f"the file is {_BRANDS.get(data[8:12], 'an MP4 or QuickTime file')}"
    head = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in head:
        return "the file is an SVG drawing, which has no pixels of its own"
    if head.startswith((b"<!doctype html", b"<html")):
        return "the file is a web page, perhaps an error page saved under an image's name"
    try:
        head.decode()
    except UnicodeDecodeError:
        return f"the file of {len(data)} bytes is no image we know (it starts with {data[:8].hex(' ')})"
    return "the file is text" if head and b"\0" not in head else "the file holds no image we know"


def _reason(failure: Exception) -> str:
    return " ".join(str(failure).split()) or type(failure).__name__


# --- decoding ---

# The plugins themselves rather than Image.open: no guessing among formats, no second look at the pixel count,
# and for JPEG no search for further pictures behind the first.
_PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
_warnings_lock = Lock()

# What takes minutes to decode though it is small: each scan of a JPEG costs as much as a picture, and encoders write
# ten or so; run lengths of a BMP are decoded byte by byte in Python.
_MAX_SCANS = 100
_MAX_BMP_RUN_BYTES = 8 * 2**20


def _load(data: bytes, header: StoredHeader) -> Image.Image:
    if header.format == "JPEG" and _num_scans(data) > _MAX_SCANS:
        raise BadMediaError(f"{header} has more than {_MAX_SCANS} scans; save it again")
    if header.format == "BMP" and len(data) > _MAX_BMP_RUN_BYTES and data[30:34] in (b"\1\0\0\0", b"\2\0\0\0"):
        raise BadMediaError(f"{header} is run-length coded and has {len(data)} bytes; save it as PNG")
    with ExitStack() as stack:
        if Image.MAX_IMAGE_PIXELS is not None and header.width * header.height > Image.MAX_IMAGE_PIXELS:
            # Our limit admits more than Pillow likes, and some plugins would warn. Warning filters belong to
            # the whole process, so they are touched in this rare case alone, by one thread at a time.
            stack.enter_context(_warnings_lock)
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image = _PLUGINS[header.format](BytesIO(_without_exif(data, header)))
        if header.format == "TIFF":
            image.info.pop("xmp", None)  # Pillow would turn by XMP what has no orientation tag
        image.load()
    return image


_JPEG_MARKER = re.compile(rb"\xff[^\0\xff\xd0-\xd7]")


def _num_scans(data: bytes) -> int:
    """Scans of a JPEG; below the limit perhaps too many, which is quicker to say."""
    # Never within compressed pixels; numpy is eight times as fast as `data.count`, and other threads run meanwhile.
    num_scans = sum(
        int(np.count_nonzero(np.frombuffer(data, "<u2", count=(len(data) - start) // 2, offset=start) == 0xDAFF))
        for start in (0, 1)
    )
    if num_scans <= _MAX_SCANS:
        return num_scans
    num_scans, position = 0, 2  # now exactly: what follows the picture in its file may hold anything
    while match := _JPEG_MARKER.search(data, position):
        kind, position = data[match.start() + 1], match.end()
        if kind == 0xD9 or num_scans > _MAX_SCANS:
            break
        num_scans += kind == 0xDA
        if kind not in (0x01, 0xD8):  # those two have no body
            position += int.from_bytes(data[position : position + 2])
    return num_scans


def _without_exif(data: bytes, header: StoredHeader) -> bytes:
    """Hide the EXIF blocks of a JPEG: Pillow would read all of them for a resolution, slowly, and warn of damage."""
    if not header.exif_at:
        return data
    hidden = bytearray(data)
    for position in header.exif_at:
        hidden[position : position + 4] = b"exif"
    return bytes(hidden)


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _upright(image: Image.Image, header: StoredHeader) -> Image.Image:
    if header.format == "TIFF" or header.orientation == 1:  # Pillow turns a TIFF as it loads it
        return image
    return image.transpose(_TURNS[header.orientation])

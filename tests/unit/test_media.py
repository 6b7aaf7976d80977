import random
import struct
import time
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from encoder.errors import BadMediaError, ItemError, MediaTooLargeError
from encoder.media import MediaHeader, decode_image, probe_header
from encoder.pictures import draw_picture

PHOTO = draw_picture(37, 23, seed=1)
WHITE = (255, 255, 255)


def encode(image: Image.Image, file_format: str, **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def probe(data: bytes, max_pixels: int = 10**7, max_bytes: int = 10**7) -> MediaHeader:
    return probe_header(data, max_pixels=max_pixels, max_bytes=max_bytes)


def decode(data: bytes, max_pixels: int = 10**7, max_bytes: int = 10**7) -> Image.Image:
    """Decode, and hold the result against the probe."""
    image = decode_image(data, max_pixels=max_pixels, max_bytes=max_bytes)
    header = probe(data, max_pixels, max_bytes)
    assert (image.size, image.mode) == ((header.width, header.height), "RGB")
    return image


def pixel(image: Image.Image, x: int = 0, y: int = 0) -> tuple[int, ...]:
    value = image.getpixel((x, y))
    assert isinstance(value, tuple)
    return tuple(int(part) for part in value)


def png(
    rows: list[bytes], width: int, bits: int, colour: int, extra: bytes = b"", tail: bytes = b"", interlace: int = 0
) -> bytes:
    """A PNG written by hand: Pillow writes few of its colour types and depths."""
    header = struct.pack(">IIBBBBB", width, len(rows), bits, colour, 0, 0, interlace)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = chunk(b"IHDR", header) + extra + chunk(b"IDAT", pixels) + tail + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def tiff(
    pixels: bytes, size: tuple[int, int], tags: dict[int, tuple[int, ...]], order: str = "<", big: bool = False
) -> bytes:
    """An uncompressed TIFF of one strip, written by hand."""
    tags = {256: (size[0],), 257: (size[1],), 259: (1,), 273: (0,), 278: (size[1],), 279: (len(pixels),)} | tags
    mark = b"II" if order == "<" else b"MM"
    head = struct.pack(order + ("HHHQ" if big else "HI"), *((43, 8, 0, 16) if big else (42, 8)))
    entry_bytes, count, offset = (20, "Q", "Q") if big else (12, "H", "I")
    directory_bytes = struct.calcsize(order + count) + entry_bytes * len(tags) + struct.calcsize(order + offset)
    extra_at = len(mark + head) + directory_bytes
    entries, extra = b"", b""
    long_tags = {tag: values for tag, values in tags.items() if 2 * len(values) > (8 if big else 4)}
    pixels_at = extra_at + sum(2 * len(values) for values in long_tags.values())
    for tag, values in sorted(tags.items()):
        kind = 4 if tag in (273, 279) else 3
        values = (pixels_at,) if tag == 273 else values
        body = struct.pack(order + ("I" if kind == 4 else "H") * len(values), *values)
        if tag in long_tags:
            extra += body
            body = struct.pack(order + offset, extra_at + len(extra) - len(body))
        entries += struct.pack(order + "HH" + offset, tag, kind, len(values))
        entries += body.ljust(8 if big else 4, b"\0")
    return mark + head + struct.pack(order + count, len(tags)) + entries + bytes(8 if big else 4) + extra + pixels


def turned_exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[274] = orientation
    return exif


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_each_format_decodes_to_the_picture_that_was_saved(file_format: str) -> None:
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}.get(file_format, {})
    data = encode(PHOTO, file_format, **options)
    difference = np.abs(np.asarray(decode(data)).astype(int) - np.asarray(PHOTO))
    assert difference.mean() < (12 if file_format in ("JPEG", "GIF") else 0.1)
    assert probe(data).format == file_format
    assert probe(data).note is None


@pytest.mark.parametrize(
    "data",
    [
        encode(PHOTO, "JPEG", progressive=True),
        encode(PHOTO.convert("L"), "JPEG"),
        encode(PHOTO, "MPO", save_all=True, append_images=[PHOTO.resize((9, 9))]),
        encode(PHOTO, "WEBP"),
        encode(PHOTO.convert("RGBA"), "WEBP"),
        encode(PHOTO, "BMP"),
        encode(PHOTO.convert("1"), "BMP"),
        encode(PHOTO.convert("P"), "BMP"),
        encode(PHOTO, "TIFF", compression="jpeg"),
        encode(PHOTO, "TIFF", compression="tiff_lzw"),
        encode(PHOTO.convert("1"), "TIFF", compression="group4"),
        encode(PHOTO, "TIFF", big_tiff=True),
    ],
    ids=lambda data: f"{data[:4]!r} {len(data)} bytes",
)
def test_kinds_of_a_format_have_the_probed_size(data: bytes) -> None:
    assert decode(data).size == PHOTO.size
    assert probe(data).note is None


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_is_applied(file_format: str, orientation: int) -> None:
    image = Image.new("RGB", (24, 16), "black")
    image.paste((255, 0, 0), (0, 0, 8, 8))  # where the red corner lies tells the turn
    upright = decode(encode(image, file_format, exif=turned_exif(orientation)))
    assert upright.size == ((16, 24) if orientation >= 5 else (24, 16))
    right, bottom = upright.width - 4, upright.height - 4
    corners = {1: (3, 3), 2: (right, 3), 3: (right, bottom), 4: (3, bottom)}
    corners |= {5: (3, 3), 6: (right, 3), 7: (right, bottom), 8: (3, bottom)}
    assert pixel(upright, *corners[orientation])[0] > 200


def test_orientation_behind_the_pixels_of_a_png_counts() -> None:
    exif = turned_exif(6).tobytes().removeprefix(b"Exif\0\0")
    data = png([bytes(6)], width=2, bits=8, colour=2, tail=chunk(b"eXIf", exif))
    assert decode(data).size == (1, 2)


@pytest.mark.parametrize(
    "exif", [b"", b"II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 40, b"nonsense"]
)
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_broken_exif_is_ignored(file_format: str, exif: bytes) -> None:
    data = encode(PHOTO, file_format, exif=b"Exif\0\0" + exif)
    assert decode(data).size == PHOTO.size


def test_an_orientation_that_does_not_exist_is_ignored() -> None:
    assert decode(encode(PHOTO, "JPEG", exif=turned_exif(9))).size == PHOTO.size


def test_xmp_does_not_turn_a_tiff() -> None:
    xmp = b'<x tiff:Orientation="6"/>'
    assert decode(encode(PHOTO, "TIFF", tiffinfo={700: xmp})).size == PHOTO.size


GREYS = {1: (0, 1), 2: (1, 3), 4: (5, 15), 8: (77, 255), 16: (0x4D12, 0xFFFF)}


def pack(values: tuple[int, ...], bits: int) -> bytes:
    if bits == 16:
        return struct.pack(f">{len(values)}H", *values)
    text = "".join(f"{value:0{bits}b}" for value in values)
    return int(text.ljust(-(-len(text) // 8) * 8, "0"), 2).to_bytes(-(-len(text) // 8), "big")


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_grey_png_of_any_depth_is_scaled_to_8_bits(bits: int) -> None:
    values = GREYS[bits]
    image = decode(png([pack(values, bits)], width=2, bits=bits, colour=0))
    assert pixel(image, 0)[0] == pytest.approx(values[0] * 255 / (2**bits - 1), abs=1)
    assert pixel(image, 1) == WHITE


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_transparent_grey_of_a_png_becomes_white(bits: int) -> None:
    values = (GREYS[bits][0], GREYS[bits][0] + 1 - 2 * (bits == 16))
    data = png([pack(values, bits)], 2, bits, 0, chunk(b"tRNS", struct.pack(">H", values[0])))
    image = decode(data)
    assert pixel(image, 0) == WHITE
    assert pixel(image, 1)[0] == pytest.approx(values[1] * 255 / (2**bits - 1), abs=1)


@pytest.mark.parametrize("bits", [8, 16])
def test_colour_png_and_its_transparent_colour(bits: int) -> None:
    scale = 1 if bits == 8 else 257
    row = pack(tuple(value * scale for value in (10, 20, 30, 40, 50, 60)), bits)
    assert pixel(decode(png([row], 2, bits, 2)), 1) == (40, 50, 60)
    key = chunk(b"tRNS", struct.pack(">HHH", *(value * scale for value in (10, 20, 30))))
    image = decode(png([row], 2, bits, 2, key))
    assert (pixel(image, 0), pixel(image, 1)) == (WHITE, (40, 50, 60))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("colour", [4, 6])
def test_alpha_of_a_png_is_laid_on_white(bits: int, colour: int) -> None:
    scale = 1 if bits == 8 else 257
    grey = [100] * (1 if colour == 4 else 3)
    values = [value * scale for alpha in (255, 0, 128) for value in (*grey, alpha)]
    image = decode(png([pack(tuple(values), bits)], 3, bits, colour))
    assert [pixel(image, x)[0] for x in range(3)] == [100, 255, pytest.approx(177, abs=1)]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_palette_png_with_transparent_entries(bits: int) -> None:
    palette = chunk(b"PLTE", bytes([200, 0, 0, 0, 100, 0]))
    row = pack((0, 1), bits)
    image = decode(png([row], 2, bits, 3, palette))
    assert (pixel(image, 0), pixel(image, 1)) == ((200, 0, 0), (0, 100, 0))
    image = decode(png([row], 2, bits, 3, palette + chunk(b"tRNS", bytes([0, 128]))))
    assert pixel(image, 0) == WHITE
    assert pixel(image, 1) == (pytest.approx(127, abs=1), pytest.approx(177, abs=1), pytest.approx(127, abs=1))


def test_transparent_pixels_of_a_gif_become_white() -> None:
    image = Image.new("P", (4, 2), 1)
    image.putpalette([0, 0, 0, 9, 8, 7])
    image.putpixel((0, 0), 0)
    decoded = decode(encode(image, "GIF", transparency=0))
    assert (pixel(decoded, 0), pixel(decoded, 1)) == (WHITE, (9, 8, 7))


def test_cmyk_jpeg_and_tiff_come_out_in_their_colours() -> None:
    red = Image.new("RGB", (16, 16), (220, 30, 30))
    for data in (encode(red.convert("CMYK"), "JPEG", quality=95), encode(red.convert("CMYK"), "TIFF")):
        assert np.abs(np.subtract(pixel(decode(data), 8, 8), (220, 30, 30))).max() < 12


@pytest.mark.parametrize(("order", "big"), [("<", False), (">", False), ("<", True)])
def test_16_bit_grey_tiff_is_scaled(order: str, big: bool) -> None:
    data = tiff(struct.pack(order + "2H", 0x8000, 0xFFFF), (2, 1), {258: (16,), 262: (1,), 277: (1,)}, order, big)
    image = decode(data)
    assert (pixel(image, 0), pixel(image, 1)) == ((128,) * 3, WHITE)


def test_tiff_where_zero_is_white_is_turned_over() -> None:
    shades = struct.pack("<2H", 0, 0xFFFF)
    image = decode(tiff(shades, (2, 1), {258: (16,), 262: (0,), 277: (1,)}))
    assert (pixel(image, 0), pixel(image, 1)) == (WHITE, (0, 0, 0))
    image = decode(tiff(b"\0\xff", (2, 1), {258: (8,), 262: (0,), 277: (1,)}))
    assert (pixel(image, 0), pixel(image, 1)) == (WHITE, (0, 0, 0))


def test_12_bit_tiff_is_scaled() -> None:
    image = decode(tiff(b"\x80\x0f\xff", (2, 1), {258: (12,), 262: (1,), 277: (1,)}))
    assert (pixel(image, 0), pixel(image, 1)) == ((128,) * 3, WHITE)


def test_premultiplied_tiff_is_laid_on_white_once() -> None:
    half_of_100 = bytes([50, 50, 50, 128])
    tags = {258: (8, 8, 8, 8), 262: (2,), 277: (4,), 338: (1,)}
    assert pixel(decode(tiff(half_of_100, (1, 1), tags)))[0] == pytest.approx(50 + 127, abs=2)


@pytest.mark.parametrize(
    ("pixels", "tags", "said"),
    [
        (struct.pack("<f", 0.5), {258: (32,), 262: (1,), 339: (3,)}, "floating-point"),
        (struct.pack("<h", -5), {258: (16,), 262: (1,), 339: (2,)}, "signed"),
        (struct.pack("<I", 5), {258: (32,), 262: (1,)}, "32-bit"),
        (bytes(3), {258: (8, 8, 8), 262: (8,), 277: (3,)}, "LAB"),
        (struct.pack("<3f", 0, 0, 0), {258: (32, 32, 32), 262: (2,), 277: (3,), 339: (3, 3, 3)}, "cannot be decoded"),
    ],
)
def test_samples_that_name_no_colour_are_refused(pixels: bytes, tags: dict[int, tuple[int, ...]], said: str) -> None:
    with pytest.raises(BadMediaError, match=said):
        decode(tiff(pixels, (1, 1), {277: (1,)} | tags))


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_several_frames_the_first_is_taken_and_said(file_format: str) -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "green", "blue")]
    options = {"WEBP": {"lossless": True}}.get(file_format, {})
    data = encode(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
    header = probe(data)
    assert header.num_frames == 3
    assert header.note == f"first of 3 {'pages' if file_format == 'TIFF' else 'frames'}"
    assert pixel(decode(data)) == (255, 0, 0)


def test_a_gif_frame_that_sticks_out_enlarges_the_picture() -> None:
    data = bytearray(encode(Image.new("P", (20, 10)), "GIF"))
    data[6:10] = struct.pack("<HH", 5, 5)
    assert decode(bytes(data)).size == (20, 10)


def test_a_top_down_bmp_has_its_height() -> None:
    data = bytearray(encode(PHOTO, "BMP"))
    data[22:26] = struct.pack("<i", -PHOTO.height)
    upside_down = decode(bytes(data)).transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    assert upside_down.tobytes() == PHOTO.tobytes()


def test_limits_hold_before_anything_is_decoded() -> None:
    claims_much = png([b"\0"], width=60_000, bits=8, colour=2)
    for act in (probe, decode):
        with pytest.raises(MediaTooLargeError, match=r"60000 pixels, the limit is 59999.*encoder\.max_pixels"):
            act(claims_much, max_pixels=59_999)
        with pytest.raises(MediaTooLargeError, match=r"bytes, the limit is 50.*encoder\.max_bytes"):
            act(claims_much, max_bytes=50)
    with pytest.raises(BadMediaError, match="PNG image of 60000x1 cannot be decoded"):
        decode(claims_much)


def test_an_image_at_the_limit_passes() -> None:
    data = encode(PHOTO, "PNG")
    assert decode(data, max_pixels=37 * 23, max_bytes=len(data)).size == PHOTO.size


def test_pillows_own_pixel_limit_neither_warns_nor_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)  # PHOTO has 851
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for file_format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
            assert decode(encode(PHOTO, file_format)).size == PHOTO.size
    assert not caught
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for file_format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        try:
            assert decode(encode(PHOTO, file_format)).size == PHOTO.size
        except MediaTooLargeError as refused:
            assert "MAX_IMAGE_PIXELS" in str(refused)  # noqa: PT017


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"Dear photo,\nhow are you?", "text"),
        ("Grüße".encode(), "text"),
        (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"<!DOCTYPE html><title>404</title>", "web page"),
        (b"%PDF-1.7", "PDF"),
        (b"MM\0+\0\x08", "BigTIFF"),
        (b"\0\0\0\x20ftypavif", "AVIF"),
        (b"\0\0\0\x20ftypheic", "HEIC"),
        (b"\0\0\0\x20ftypisom", "MP4"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS"),
        (b"\x8f\x01\xfe\x99", "starts with 8f 01 fe 99"),
        (bytes(1000), "no image we know"),
        (b"BMW is a maker of cars and of motorcycles", "damaged or incomplete"),
        (b"\xff\xd8\xff", "damaged or incomplete"),
        (b"\x89PNG\r\n\x1a\n", "damaged or incomplete"),
        (b"GIF89a", "damaged or incomplete"),
        (b"GIF89a" + bytes(7), "no frame"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "damaged or incomplete"),
        (b"RIFF\0\0\0\0WEBPJUNK", "VP8X"),
        (b"II*\0\x08\0\0\0\0\0\0\0\0\0", "no size"),
        (b"II*\0\0\0\0\0", "no directory"),
        (png([], width=5, bits=8, colour=2), "no pixels"),
        (png([b"\0"], width=1, bits=7, colour=2), "cannot be decoded"),
    ],
)
def test_what_is_no_image_is_named(data: bytes, said: str) -> None:
    with pytest.raises(BadMediaError, match=said):
        decode(data)


BIG_TIFF = b"II+\0" + struct.pack("<HH", 8, 0)
FAR = struct.pack("<Q", 2**64 - 1)


@pytest.mark.parametrize(
    "data",
    [
        BIG_TIFF + FAR,
        BIG_TIFF + struct.pack("<Q", 16) + FAR + bytes(40),
        BIG_TIFF + struct.pack("<QQHHQ", 16, 1, 256, 4, 9) + FAR + bytes(40),
    ],
)
def test_offsets_of_64_bits_that_lead_nowhere_are_a_damaged_header(data: bytes) -> None:
    with pytest.raises(BadMediaError, match="ends inside its header"):
        probe(data)


MEBIBYTE = 2**20
JPEG_TAIL = encode(PHOTO, "JPEG")[2:]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8" + b"\xff" * (8 * MEBIBYTE) + JPEG_TAIL,
        b"\xff\xd8" + b"\xff\xe0\0\2" * (2 * MEBIBYTE) + JPEG_TAIL,
        b"\xff\xd8" + b"\xff\xe1\0\x08Exif\0\0" * 90_000 + JPEG_TAIL,
        png([b"\0"], 1, 8, 0, extra=chunk(b"tEXt", b"a\0b") * 400_000),
        png([b"\0"], 1, 8, 0, extra=chunk(b"eXIf", b"II*\0\x08\0\0\0\xff\x0f" + bytes(49_140)) * 200),
        b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(10) + b"JUNK\0\0\0\0" * MEBIBYTE,
        b"GIF89a" + bytes(7) + b"\x21\xfe" + b"\1a" * (4 * MEBIBYTE),
    ],
    ids=["fill bytes", "segments", "EXIF segments", "chunks", "EXIF chunks", "WebP chunks", "GIF blocks"],
)
def test_a_header_that_never_ends_is_read_in_no_time(data: bytes) -> None:
    started_s = time.process_time()
    with suppress(BadMediaError):
        probe(data, max_bytes=2**30)
    assert time.process_time() - started_s < 5


def test_a_jpeg_of_thousands_of_scans_is_refused_and_what_follows_a_picture_is_not_counted() -> None:
    data = encode(PHOTO, "JPEG", progressive=True)
    last = data[data.rfind(b"\xff\xda") : -2]
    decode(data + b"\xff\xda" * 5000)
    decode(data[:-2] + last * 20 + data[-2:])
    with pytest.raises(BadMediaError, match="more than 100 scans"):
        decode(data[:-2] + last * 5000 + data[-2:])


def test_a_large_run_length_coded_bmp_is_refused() -> None:
    header = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 0, 0, 0, 1078, 40, 255, 9, 1, 8, 1, 0, 0, 0, 256, 0)
    data = header + bytes(1024)
    decode(data + b"\xff\0\0\0" * 9)
    with pytest.raises(BadMediaError, match="run-length coded"):
        decode(data + b"\1\0" * 5_000_000, max_bytes=2**30)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_file_cut_anywhere_is_a_typed_error_or_a_picture(file_format: str) -> None:
    data = encode(draw_picture(64, 48, seed=2), file_format)
    for end in range(0, len(data) - 1, max(1, len(data) // 60)):
        picture_or_error(data[:end])
    with pytest.raises(BadMediaError):
        decode(data[: len(data) // 2])


def picture_or_error(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Pillow's, about tags of TIFF files
        try:
            header = probe(data)
        except ItemError as error:
            with pytest.raises(type(error)):
                decode(data)
            return
        try:
            image = decode(data)
        except ItemError as error:
            assert str(error)  # noqa: PT017
            return
    assert image.size == (header.width, header.height)


MAKERS: list[Callable[[], bytes]] = [
    lambda: encode(PHOTO, "JPEG", exif=turned_exif(6)),
    lambda: encode(PHOTO.convert("CMYK"), "JPEG", progressive=True),
    lambda: encode(PHOTO, "PNG", exif=turned_exif(5)),
    lambda: encode(PHOTO.convert("P"), "PNG", transparency=3),
    lambda: png([pack((1, 2, 3), 16)] * 3, 3, 16, 0, chunk(b"tRNS", b"\0\1")),
    lambda: encode(PHOTO, "WEBP", exif=turned_exif(8)),
    lambda: encode(PHOTO.convert("RGBA"), "WEBP", lossless=True, save_all=True, append_images=[PHOTO]),
    lambda: encode(PHOTO, "GIF", save_all=True, append_images=[PHOTO.rotate(90)]),
    lambda: encode(PHOTO.convert("P"), "BMP"),
    lambda: encode(PHOTO, "TIFF", exif=turned_exif(7), compression="tiff_lzw"),
    lambda: encode(PHOTO, "TIFF", compression="jpeg"),
    lambda: tiff(struct.pack("<2H", 1, 2), (2, 1), {258: (16,), 262: (0,), 277: (1,), 274: (6,)}),
]


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(maker=st.sampled_from(range(len(MAKERS))), seed=st.integers(0, 2**32))
def test_corrupted_files_give_a_picture_of_the_probed_size_or_a_typed_error(maker: int, seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(MAKERS[maker]())
    reach = rng.choice((40, 200, len(data)))  # headers break in more ways than pixels do
    for _ in range(rng.randint(1, 8)):
        position = rng.randrange(min(reach, len(data)))
        match rng.randrange(4):
            case 0:
                data[position] = rng.randrange(256)
            case 1:
                data[position] ^= 1 << rng.randrange(8)
            case 2:
                del data[position : position + rng.randint(1, 9)]
            case _:
                data[position:position] = rng.randbytes(rng.randint(1, 9))
    picture_or_error(bytes(data))


def test_decoding_in_many_threads_gives_the_same_pictures() -> None:
    files = [maker() for maker in MAKERS] * 8
    expected = [decode(data).tobytes() for data in files]
    with ThreadPoolExecutor(8) as threads:
        assert [image.tobytes() for image in threads.map(decode, files)] == expected


def test_drawn_pictures_repeat_and_differ() -> None:
    pictures = [draw_picture(40, 30, seed=seed).tobytes() for seed in range(4)]
    assert draw_picture(40, 30, seed=0).tobytes() == pictures[0]
    assert all(one != other for one, other in pairwise(pictures))
    assert draw_picture(1, 1, seed=0).size == (1, 1)

"""Colour modes: whatever Pillow decodes a file to becomes an 8-bit RGB picture, the same for each format."""

from __future__ import annotations

import numpy as np
from PIL import Image

from encoder.errors import BadMediaError
from encoder.stored_header import StoredHeader


def to_rgb(image: Image.Image, header: StoredHeader) -> Image.Image:
    """The picture in 8-bit RGB; 16-bit samples are scaled, transparency is laid on white.

    Raises BadMediaError for samples that name no colour: signed, of 32 bits or floating-point, LAB and HSV.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and header.format == "PNG"):
        return _grey_to_rgb(np.asarray(image), header)
    if image.mode in ("I", "F"):
        kind = "floating-point" if image.mode == "F" else "signed or 32-bit"
        raise BadMediaError(
            f"{header} has {kind} samples, which name no black and white; save it with 8 or 16 bits a sample"
        )
    if image.mode in ("LAB", "HSV"):
        raise BadMediaError(f"{header} is in {image.mode} colours; save it as RGB")
    if header.transparent is not None:
        if len(header.transparent) == 1:
            return _grey_to_rgb(np.asarray(image.convert("L")), header)
        return _colour_key_on_white(image, header)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        return _on_white(image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _grey_to_rgb(samples: np.ndarray, header: StoredHeader) -> Image.Image:
    """Grey samples of the file's depth, or already scaled to 8 bits, to RGB."""
    shift = max(header.sample_bits - 8, 0)  # the high byte, as Pillow takes it of 16-bit colours
    grey = (samples >> shift).astype(np.uint8)
    if header.white_is_zero:
        grey = 255 - grey
    if header.transparent is not None:
        (key,) = header.transparent
        if header.sample_bits < 8:
            key = key * 255 // (2**header.sample_bits - 1)
        grey[samples == key] = 255
    return Image.fromarray(grey).convert("RGB")


def _colour_key_on_white(image: Image.Image, header: StoredHeader) -> Image.Image:
    """A PNG in which one colour is transparent; of 16 bits Pillow keeps the high byte, so it is compared."""
    assert header.transparent is not None
    pixels = np.array(image.convert("RGB"))
    key = [value >> max(header.sample_bits - 8, 0) for value in header.transparent]
    pixels[(pixels == key).all(axis=-1)] = 255
    return Image.fromarray(pixels)


def _on_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image.convert("RGB"), mask=image.getchannel("A"))
    return white

"""`StoredHeader`: what an image file says of itself before any pixel is decoded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredHeader:
    """A file's header as it stands there: the size before orientation, and what decoding has to know."""

    format: str
    width: int
    height: int
    orientation: int = 1  # of EXIF: 1 to 8
    num_frames: int = 1
    sample_bits: int = 8  # PNG and TIFF: bits of one sample
    white_is_zero: bool = False  # TIFF: grey runs from white to black
    exif_at: tuple[int, ...] = ()  # JPEG: where its EXIF blocks start
    transparent: tuple[int, ...] | None = None  # PNG: the sample or the colour that is fully transparent

    def __str__(self) -> str:
        width, height = self.upright_size
        return f"{self.format} image of {width}x{height}"

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height once the orientation is applied."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


class HeaderError(Exception):
    """The header does not hold together; the message says where."""

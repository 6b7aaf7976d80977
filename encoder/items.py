"""An item's bytes, image or video, on their way to an adapter: one place decides which of the two they are."""

from __future__ import annotations

from collections.abc import Iterator

from encoder.adapters.base import EncoderAdapter, Segment, TakesVideo
from encoder.config import EncoderConfig
from encoder.errors import BadMediaError
from encoder.media import FORMATS, MediaHeader, decode_image, probe_header
from encoder.types import ItemShape
from encoder.video import FORMATS as VIDEO_FORMATS
from encoder.video import Video, is_video, probe_video

PART_PATCHES = 16_384
"""A clip's segments go on in parts of about so many patches, while the rest of it is decoded."""


def probe_item(data: bytes, adapter: EncoderAdapter, config: EncoderConfig) -> tuple[MediaHeader, ItemShape]:
    """What the header says, and the item's sizes. Raises what `probe_header` and `probe_video` raise."""
    if not is_video(data):
        wanted = f"{FORMATS}, or a video: {VIDEO_FORMATS}" if isinstance(adapter, TakesVideo) else FORMATS
        header = probe_header(data, max_pixels=config.max_pixels, max_bytes=config.max_bytes, wanted=wanted)
        return header, adapter.probe(header)
    taker = _taker(adapter)
    header = probe_video(data, max_pixels=config.max_pixels, limits=config.video)
    return header, taker.probe_video(header)


def prepare_item(data: bytes, adapter: EncoderAdapter, config: EncoderConfig) -> Iterator[list[Segment]]:
    """The item's segments in parts: an image at once, a clip bit by bit. CPU only; raises as `probe_item` does."""
    if not is_video(data):
        yield adapter.prepare(decode_image(data, max_pixels=config.max_pixels, max_bytes=config.max_bytes))
        return
    taker = _taker(adapter)
    header = probe_video(data, max_pixels=config.max_pixels, limits=config.video)
    part: list[Segment] = []
    for segment in taker.prepare_video(Video(data, header, max_pixels=config.max_pixels)):
        part.append(segment)
        if sum(segment.shape.num_patches for segment in part) >= PART_PATCHES:
            yield part
            part = []
    if part:
        yield part


def _taker(adapter: EncoderAdapter) -> TakesVideo:
    """The same adapter. Raises BadMediaError when its model takes no video."""
    if not isinstance(adapter, TakesVideo):
        raise BadMediaError(f"the file is a video and {adapter.encoder} takes images only; send {FORMATS}")
    return adapter


def max_item_bytes(adapter: EncoderAdapter, config: EncoderConfig) -> int:
    """Most bytes that any item may have."""
    return max(config.max_bytes, config.video.max_bytes) if isinstance(adapter, TakesVideo) else config.max_bytes

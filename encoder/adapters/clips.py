"""Videos for families that look at tiles: each sampled frame is one tile, resized as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from encoder.adapters.base import Segment
from encoder.adapters.cutting import Tile, cut_out
from encoder.adapters.processors import note_clip_pixels
from encoder.adapters.stock_families import TileFamily
from encoder.adapters.tiles import TileAdapter
from encoder.types import ItemShape

if TYPE_CHECKING:
    from encoder.config import EncoderConfig, VideoConfig
    from encoder.media import MediaHeader
    from encoder.video import Video


class ClipTileFamily(TileFamily, Protocol):
    """What a family of tiles says of clips besides."""

    def frame_numbers(self, header: MediaHeader, options: VideoConfig) -> list[int]:
        """The frames that are read, rising; at least one."""

    def frame_tile(self, width: int, height: int) -> Tile:
        """How a frame of this size becomes a tile."""


class ClipTileAdapter(TileAdapter):
    """A `TileAdapter` that takes video too. Implements `TakesVideo`."""

    family: ClipTileFamily

    def __init__(self, family: ClipTileFamily, config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> None:
        """Raises ConfigError as `TileAdapter` does."""
        super().__init__(family, config, name, encoder)
        self._video = encoder.video
        (self.tile,) = self.kinds.values()
        note_clip_pixels(config, family.pixels, name)

    def probe_video(self, header: MediaHeader) -> ItemShape:
        """A tile a frame."""
        return ItemShape.of([self.tile.shape] * len(self.family.frame_numbers(header, self._video)))

    def prepare_video(self, video: Video) -> Iterator[Segment]:
        """Tiles one after another, as frames are decoded."""
        tile = self.family.frame_tile(video.header.width, video.header.height)
        for frame in video.frames(self.family.frame_numbers(video.header, self._video)):
            (picture,) = cut_out(frame, [tile], self.family.pixels.resample)
            yield self.tile.segment(picture)

"""Videos for families that look at tiles: each sampled frame is one tile, resized as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from encoder.adapters.base import Segment
from encoder.adapters.tiles import TileAdapter, TileFamily
from encoder.types import ItemShape

if TYPE_CHECKING:
    from encoder.config import EncoderConfig, VideoConfig
    from encoder.media import MediaHeader
    from encoder.video import Video


class ClipTileAdapter(TileAdapter):
    """A `TileAdapter` that takes video too. Implements `TakesVideo`."""

    def __init__(
        self, family: TileFamily, config: Mapping[str, Any], name: str, encoder: EncoderConfig, *, num_frames: int
    ) -> None:
        """`num_frames` of a clip are taken where the configuration names neither a number nor a rate."""
        super().__init__(family, config, name, encoder)
        self._video, self._num_frames = encoder.video, num_frames

    def probe_video(self, header: MediaHeader) -> ItemShape:
        """A tile a frame."""
        return self.shape_of(len(middle_frames(header, self._video, self._num_frames)))

    def prepare_video(self, video: Video) -> Iterator[Segment]:
        """Tiles one after another, as frames are decoded."""
        for frame in video.frames(middle_frames(video.header, self._video, self._num_frames)):
            yield self.segment(np.asarray(frame.resize(self.family.tile_size, self.family.pixels.resample)))


def middle_frames(header: MediaHeader, options: VideoConfig, default: int) -> list[int]:
    """Numbers of the frames in the middle of equal stretches of the clip, as InternVL's video processor takes them."""
    wanted = options.num_frames
    if wanted is None and options.fps is not None:
        wanted = int(header.num_frames / header.frames_per_s * options.fps)
        wanted = min(max(wanted, options.min_frames or 1), options.max_frames or wanted)
    count = max(1, min(wanted or default, header.num_frames))
    stretch = header.num_frames / count
    # Rounded to float32 first, as that processor counts: it decides where a middle falls between two frames.
    return [int(np.float32(stretch / 2 + index * stretch)) for index in range(count)]

"""Videos for families that pack patches of any grids: some frames make a segment, decoded when their turn comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from encoder.adapters.base import Segment
from encoder.adapters.cutting import Tile, cut_out, size_of
from encoder.adapters.grids import GridAdapter
from encoder.adapters.processors import note_clip_pixels
from encoder.adapters.stock_families import GridFamily
from encoder.types import Grid, ItemShape

if TYPE_CHECKING:
    from encoder.config import EncoderConfig, VideoConfig
    from encoder.media import MediaHeader
    from encoder.video import Video


class ClipGridFamily(GridFamily, Protocol):
    """What a family of grids says of clips besides."""

    frames_together: int  # frames that make a segment
    frames_a_patch: int  # of those, frames whose pixels share a patch: 1, or all of them

    def frame_numbers(self, header: MediaHeader, options: VideoConfig) -> list[int]:
        """The frames that are read, never falling; at least one, and a multiple of `frames_a_patch`."""

    def cut_frame(self, width: int, height: int, num_frames: int) -> list[Tile]:
        """The pieces of each of so many frames of this size."""


class ClipGridAdapter(GridAdapter):
    """A `GridAdapter` that takes video too. Implements `TakesVideo`."""

    family: ClipGridFamily

    def __init__(self, family: ClipGridFamily, config: Mapping[str, Any], name: str, encoder: EncoderConfig) -> None:
        """Raises ConfigError as `GridAdapter` does."""
        super().__init__(family, config, name, encoder)
        self._video = encoder.video
        self.patch_bytes *= family.frames_a_patch
        note_clip_pixels(config, family.pixels, name)

    def probe_video(self, header: MediaHeader) -> ItemShape:
        """A segment for each piece of the frames that go together."""
        num_frames = len(self.family.frame_numbers(header, self._video))
        pieces = self.family.cut_frame(header.width, header.height, num_frames)
        return self.shape_of(
            [
                self._clip_grid(min(self.family.frames_together, num_frames - first), *size_of(piece))
                for first in range(0, num_frames, self.family.frames_together)
                for piece in pieces
            ]
        )

    def prepare_video(self, video: Video) -> Iterator[Segment]:
        """Segments one after another, as frames are decoded."""
        numbers = self.family.frame_numbers(video.header, self._video)
        pieces = self.family.cut_frame(video.header.width, video.header.height, len(numbers))
        together: list[list[np.ndarray]] = []
        for number, frame in enumerate(video.frames(numbers), start=1):
            together.append(cut_out(frame, pieces, self.family.pixels.resample))
            if len(together) == self.family.frames_together or number == len(numbers):
                for pictures in zip(*together, strict=True):
                    yield self._clip_segment(pictures)
                together = []

    def _clip_grid(self, num_frames: int, width: int, height: int) -> Grid:
        side = self.family.patch_size
        return num_frames // self.family.frames_a_patch, height // side, width // side

    def _clip_segment(self, pictures: Sequence[np.ndarray]) -> Segment:
        """Frames after one another, or side by side in the same patches."""
        height, width, _ = pictures[0].shape
        parts = [self.cut_patches(picture) for picture in pictures]
        patches = np.concatenate(parts, axis=1 if self.family.frames_a_patch > 1 else 0)
        return Segment(shape=self.measure(self._clip_grid(len(parts), width, height)), patches_PC=patches)

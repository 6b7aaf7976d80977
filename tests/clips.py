"""Small video files, made by PyAV, and a clip of drawn frames."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

from encoder.media import MediaHeader
from encoder.pictures import draw_picture
from encoder.video import Video

DRAWN_SIZE = (150, 100)

INTERLACED = 0x40000 | 0x20000000
"""Flags of FFmpeg's encoders: fields in motion estimation and in DCTs."""


def make_clip(
    num_frames: int,
    size: tuple[int, int] = (320, 240),
    *,
    fps: int = 30,
    codec: str = "libx264",
    container: str = "mp4",
    rotation: int | None = None,
    pixels: str = "yuv420p",
    times: Sequence[int] | None = None,
    interlaced: bool = False,
) -> bytes:
    """A clip whose frames are grey, 4 brighter from one to the next (modulo 256), with a white square at the left.

    `times` of the frames, in frames at `fps`, make its rate vary.
    """
    import av  # drawn frames need none

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = pixels
        if interlaced:
            stream.codec_context.flags |= INTERLACED
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for number in range(num_frames):
            picture = np.full((size[1], size[0], 3), brightness(number), np.uint8)
            picture[: size[1] // 2, : size[0] // 4] = 255
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if times is not None:
                frame.pts = times[number]
            for packet in stream.encode(frame):
                output.mux(packet)
        for packet in stream.encode():
            output.mux(packet)
    return buffer.getvalue()


def brightness(number: int) -> int:
    """Of a frame's grey."""
    return number * 4 % 256


def make_sound() -> bytes:
    """An MP4 of a second of silence, without pictures."""
    import av  # drawn frames need none

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=8000, layout="mono")
        for start in range(0, 8000, 1000):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1000), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 8000, start
            for packet in stream.encode(frame):
                output.mux(packet)
        for packet in stream.encode():
            output.mux(packet)
    return buffer.getvalue()


class DrawnFrames(Video):
    """A clip without a file, whose frames are drawn when they are asked for."""

    def __init__(self, num_frames: int, frames_per_s: float = 2.0) -> None:
        width, height = DRAWN_SIZE
        super().__init__(b"", MediaHeader(width=width, height=height, num_frames=num_frames, frames_per_s=frames_per_s))
        self.given = 0

    def frames(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        for number in numbers:
            self.given += 1
            yield draw_picture(*DRAWN_SIZE, number)

"""Small video files, made by PyAV."""

from __future__ import annotations

import io

import av
import numpy as np


def make_clip(
    num_frames: int,
    size: tuple[int, int] = (320, 240),
    *,
    fps: int = 30,
    codec: str = "libx264",
    container: str = "mp4",
    rotation: int | None = None,
) -> bytes:
    """A clip whose frames are grey, 4 brighter from one to the next (modulo 256), with a white square at the left."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for number in range(num_frames):
            pixels = np.full((size[1], size[0], 3), brightness(number), np.uint8)
            pixels[: size[1] // 2, : size[0] // 4] = 255
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                output.mux(packet)
        for packet in stream.encode():
            output.mux(packet)
    return buffer.getvalue()


def brightness(number: int) -> int:
    """Of a frame's grey."""
    return number * 4 % 256

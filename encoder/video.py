"""Video files: what their header says, and the wanted frames one after another. Decoding is PyAV's (FFmpeg).

Frames are upright RGB pictures. Rotation is the file's; pixels that are not square are taken as if they were, as the
models' own processors do. PyAV is imported only when there is a video to read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

from PIL import Image

from encoder.errors import BadMediaError, ConfigError, MediaTooLargeError
from encoder.media import MediaHeader

if TYPE_CHECKING:
    from encoder.config import VideoConfig

FORMATS = "MP4, QuickTime, Matroska, WebM, AVI or MPEG"

SUFFIXES = frozenset(".mp4 .m4v .mov .webm .mkv .avi .mpg .mpeg .flv .wmv .3gp .ogv".split())  # noqa: SIM905
"""File name endings of videos we read, in lower case."""

MAX_PIXELS = 2**27
"""Of a frame, where nobody says less."""

SLACK_S = 1.0
"""A clip may end so much earlier than its index says: its last frame stands in. Beyond that it is damaged."""

_STARTS = (b"\x1aE\xdf\xa3", b"FLV\x01", b"\x00\x00\x01\xba", b"0&\xb2u\x8ef\xcf\x11", b"OggS")
_IMAGE_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")
_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


def is_video(data: bytes) -> bool:
    """Whether a file starts as videos do: MP4, QuickTime, Matroska, WebM, AVI, FLV, MPEG, Windows Media or Ogg."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return data[8:12] not in _IMAGE_BRANDS
    return data.startswith(_STARTS) or (data[:4] == b"RIFF" and data[8:12] == b"AVI ")


def probe_video(data: bytes, *, max_pixels: int, limits: VideoConfig) -> MediaHeader:
    """Size, rate and number of frames. Reads the file's packets and decodes its first frame.

    Raises:
        BadMediaError: no video we read, no frame in it, or a damaged file.
        MediaTooLargeError: over the limit of bytes, pixels of a frame, or seconds.
        ConfigError: PyAV is not installed.
    """
    if len(data) > limits.max_bytes:
        raise MediaTooLargeError(
            f"video file has {len(data)} bytes, the limit is {limits.max_bytes}; "
            f"cut it or raise encoder.video.max_bytes"
        )
    with _opened(data, max_pixels) as (container, stream):
        _check_pixels(stream.width, stream.height, max_pixels)  # before a frame is decoded, which may be huge
        first, num_frames = _first_and_count(container, stream)
        if first is None:
            raise BadMediaError(f"video file of {len(data)} bytes has no frames; it is damaged or empty: send it again")
        if 0 < num_frames < stream.frames - SLACK_S * float(stream.average_rate or 30):
            raise BadMediaError(f"video has {num_frames} of {stream.frames} frames; the file is cut off: send it again")
        frames_per_s = _rate(container, stream, num_frames)
        names = str(container.format.name).split(",")
    width, height = first.width, first.height
    if _quarter_turns(first) % 180:
        width, height = height, width
    _check_pixels(width, height, max_pixels)
    if num_frames / frames_per_s > limits.max_duration_s:
        raise MediaTooLargeError(
            f"video lasts {num_frames / frames_per_s:.0f} s, the limit is {limits.max_duration_s:g}; "
            f"cut it or raise encoder.video.max_duration_s"
        )
    return MediaHeader(
        width=width,
        height=height,
        format="MP4" if "mp4" in names else names[0].upper(),
        num_frames=num_frames,
        frames_per_s=frames_per_s,
        note=f"video of {num_frames} frames, {frames_per_s:.4g} a second",
    )


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise MediaTooLargeError(
            f"video of {width}x{height} has {width * height} pixels a frame, the limit is {max_pixels}; "
            f"send it smaller or raise encoder.max_pixels"
        )


class Video:
    """A clip to be read frame by frame."""

    def __init__(self, data: bytes, header: MediaHeader, *, max_pixels: int = MAX_PIXELS) -> None:
        """`header` is what `probe_video` said of these bytes; frames that grow beyond `max_pixels` are damage."""
        self.header = header
        self._data, self._max_pixels = data, max_pixels

    def frames(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of these numbers, which never fall; one at a time, each decoded when it is asked for.

        Raises BadMediaError when the clip ends more than `SLACK_S` before the last of them, or cannot be decoded.
        """
        wanted = deque(numbers)
        picture: Image.Image | None = None
        number = -1
        with _opened(self._data, self._max_pixels) as (container, stream):
            stream.thread_type = "AUTO"
            for number, frame in enumerate(container.decode(stream)):
                if number == wanted[0]:
                    picture = _picture(frame)
                    while wanted and wanted[0] == number:
                        yield picture
                        wanted.popleft()
                    if not wanted:
                        return
                last = frame
            missing = wanted[-1] - number
            if number < 0 or missing > SLACK_S * self.header.frames_per_s:
                raise BadMediaError(f"video ends {missing} frames before it should; the file is damaged: send it again")
            picture = _picture(last)
            for _ in wanted:
                yield picture


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[tuple[Any, Any]]:
    """The container and its first stream of moving pictures; what FFmpeg stumbles over becomes a BadMediaError.

    No frame of more pixels is decoded, not even where FFmpeg looks for a stream's properties.
    """
    try:
        import av
    except ImportError as error:
        raise ConfigError("videos are read by PyAV, which is not installed; pip install 'encpool[video]'") from error
    try:
        bound = {"max_pixels": str(max_pixels)}
        with av.open(BytesIO(data), metadata_errors="ignore", options=bound) as container:
            streams = [stream for stream in container.streams.video if not _is_cover(stream)]
            if not streams:
                raise BadMediaError(f"file of {len(data)} bytes has no moving pictures in it; send a video")
            if streams[0].codec_context is None:
                raise BadMediaError(
                    f"video file of {len(data)} bytes has a codec that FFmpeg does not know; send H.264"
                )
            streams[0].codec_context.options = bound
            yield container, streams[0]
    except (av.FFmpegError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadMediaError(
            f"video file of {len(data)} bytes cannot be decoded: {reason}; it is damaged, incomplete or of a rare kind"
        ) from error


def _is_cover(stream: Any) -> bool:
    """A picture beside music."""
    return bool(stream.disposition & stream.disposition.attached_pic)


def _first_and_count(container: Any, stream: Any) -> tuple[Any, int]:
    """The first frame, if there is one, and the number of frames: packets, without those that are not shown."""
    first, num_frames = None, 0
    for packet in container.demux(stream):
        if first is None:
            first = next(iter(packet.decode()), None)
        num_frames += packet.size > 0 and not packet.is_discard
    return first, num_frames


def _rate(container: Any, stream: Any, num_frames: int) -> float:
    """Frames a second, on average."""
    rate = float(stream.average_rate or 0)
    if rate <= 0 and container.duration:
        rate = num_frames * 1e6 / container.duration
    return rate if rate > 0 else 25.0


def _quarter_turns(frame: Any) -> int:
    """Degrees, counterclockwise, that make a frame upright: 0, 90, 180 or 270."""
    return round(int(frame.rotation) / 90) * 90 % 360


def _picture(frame: Any) -> Image.Image:
    image: Image.Image = frame.to_image()
    degrees = _quarter_turns(frame)
    return image.transpose(_TURNS[degrees]) if degrees else image
